"""Situations of training scripts: at every stage the result of DDP, or an error on every rank.

One file for each kind of situation, one test function for each situation, parametrised by stage
(`stages.STAGES`). `stages.check` runs the script with torch's DDP and with the stage, on the same
ranks, and compares what it returns.
"""
