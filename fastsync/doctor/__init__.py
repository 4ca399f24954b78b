"""Checks a cluster before it trains: `python -m fastsync.doctor`, alone or under torchrun.

Ranks say what they are (`facts`), through the rendezvous store alone, since that is what works when
nothing else does. Rank 0 compares (`checks`). If nothing stands against it the ranks open their
process group and measure (`rates`), and rank 0 compares what they took. `drill` kills, stops or
ends a rank of a small training, and looks at what the others say. Each check is one function that
returns findings (`finding`); `report` writes them down.
"""
