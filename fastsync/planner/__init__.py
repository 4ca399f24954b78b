"""Plan a training before it is launched: strategy, memory, speed.

    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --gpus 64 --device h100

A model is traced once, on tensors without memory (trace.py): operations, allocations, and when each
gradient is ready. Everything else is arithmetic on that record. memory.py replays its allocations
with the engine's real buckets, for each stage of ZeRO. step_time.py replays its operations against
the buckets' collectives, whose costs hardware.py models. plan.py compares and shows
strategies. Nothing here is imported by `import fastsync`.
"""
