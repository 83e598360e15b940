"""What ``python -m accumulate bench`` runs: does accumulation keep N processes busy on this machine?"""
