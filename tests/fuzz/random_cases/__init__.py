"""Random models, options and training loops, and the rule that they are held against.

`tree` makes models, `drawing` and `wires` choose how they are wrapped, `wrapped` runs a model and
its copy side by side, `rule` compares them, `stages` is what happens in a training, `case` puts one
together, and `team` runs many.
"""
