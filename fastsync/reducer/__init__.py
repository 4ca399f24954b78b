"""From agreed plans to the C++ reducer: plans installed and renewed, state carried, checkpoints."""
