"""Random modules cut into units, held against a copy that every rank has whole.

After a backward that reduces, each gradient is what it was before plus the sum over ranks of what
each has computed since, over the divisor; where no rank has computed any it is as before.
"""
