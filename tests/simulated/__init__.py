"""A simulated device, on which the project's GPU paths run in every commit.

It is a device to torch (`torch.sim`, by PrivateUse1) with streams that lag at random, events, an
allocator per stream that overwrites what it hands out again, copies that wait where CUDA's do, and
a backend (`simccl`) that enqueues collectives as NCCL does and carries bytes over Gloo. The
project's CUDA kernels are compiled as C++ and run in the order of their stream. A race detector
says of two uses of the same memory that nothing orders what was used, on which streams, and which
lines enqueued both. Nothing in `fastsync/` or `csrc/` knows of it.

What it shows: the order of streams, the lifetime of memory, where the host waits, what is launched
and how much memory is held. What it does not show:

* Speed. Streams are queues of one thread, and tasks take what a CPU takes.
* NCCL's protocols: its transports, its order of sums, its graphs, its behaviour under faults beyond
  a kernel that spins until its communicator is aborted.
* CUDA graphs and their capture.
* The hardware's memory model: threads of a kernel run one after another, or take turns at barriers,
  so that a missing `__syncthreads` is not seen; nor are warps, caches, atomics or alignment faults.
* Races on pinned host memory, and those of kernels within one page of a block: the project's own
  kernels do not say which bytes they use, so a page counts as a whole for them.
* Operators that the CPU or torch's meta tensors lack: sparse tensors, for one.
"""
