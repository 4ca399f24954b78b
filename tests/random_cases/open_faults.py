"""What the engine does not do right, and is not drawn therefore, unless its name here is True."""

# A parameter that a rank used, zeroed to None, and did not use in the step, arrives at that rank.
ZEROED_AFTER_USE = True
# With error feedback, gradients that are left from before and used by no rank stay out of it.
STALE_WITH_FEEDBACK = True
# set_wire() between thawing a parameter and the next forward.
WIRE_AFTER_THAW = True
# set_wire() and load_sync_state_dict() after a backward that raised.
CHANGES_AFTER_FAILURE = True
# A sparse gradient that no rank used stays as it is.
UNUSED_SPARSE = True
# In the hierarchical form error feedback keeps what it owes to a parameter that no rank used.
UNUSED_IN_NODES = True
# One backward through two wrappers whose losses bypass their outputs.
JOINT_OPAQUE = True
# Under join() with a communication hook, what a joined rank used before does not count as used.
JOIN_UNDER_HOOKS = True
