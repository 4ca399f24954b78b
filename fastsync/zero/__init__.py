"""Sharding: what each rank keeps of the optimizer's state, and the steps that it makes for all."""
