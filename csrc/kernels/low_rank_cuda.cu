// Low-rank codes on the device: one launch serves all matrices of a bucket, as far as a table holds them
// ([Note: segment table]).
#include <cmath>
#include <cstdint>

#include "cuda_launch.h"
#include "cuda_table.h"
#include "low_rank.h"
#include "random.h"

namespace fastsync::kernels {
namespace {

template <class Job, int kJobs>
struct Table {
  static constexpr int kCapacity = kJobs;
  int count;
  uint32_t first_block[kJobs];  // ascending
  Job job[kJobs];
};

template <class Job>
using SmallTable = Table<Job, (kSmallParameters - 8) / (4 + static_cast<int>(sizeof(Job)))>;

// launch(table, blocks) with as many jobs at once as fit.
template <class Job, class Blocks, class Launch>
void launch_tables(const Job* jobs, size_t count, const Blocks& blocks_of, const Launch& launch) {
  using AnyTable = SmallTable<Job>;
  static_assert(sizeof(AnyTable) <= kSmallParameters);
  for (size_t begin = 0; begin < count;) {
    AnyTable table;
    table.count = 0;
    int64_t blocks = 0;
    for (; begin < count && table.count < AnyTable::kCapacity; ++begin) {
      const int64_t own = blocks_of(jobs[begin]);
      if (own == 0) continue;
      table.first_block[table.count] = static_cast<uint32_t>(blocks);
      table.job[table.count++] = jobs[begin];
      blocks += own;
    }
    FS_CHECK(blocks <= INT32_MAX, blocks, " blocks exceed one launch's ", INT32_MAX);
    if (table.count > 0) launch(table, static_cast<unsigned>(blocks));
  }
}

// --- Gram-Schmidt: a block per set of vectors ---

constexpr int kTeam = 1024;  // threads: the vectors of one matrix are all that its block waits for

// Of all threads' `mine`, in an order that depends on nothing else: ranks must get equal bits.
__device__ double block_sum(double mine) {
  __shared__ double sums[kTeam];
  const unsigned thread = threadIdx.x;
  sums[thread] = mine;
  __syncthreads();
#pragma unroll 1
  for (unsigned half = kTeam / 2; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  const double total = sums[0];
  __syncthreads();  // the next sum must not overwrite what others still read
  return total;
}

__device__ double block_dot(const float* a, const float* b, int64_t numel) {
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < numel; i += kTeam) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return block_sum(sum);
}

__device__ double block_norm(const float* vector, int64_t numel) {
  return std::sqrt(block_dot(vector, vector, numel));
}

// As normalise() in low_rank_cpu.cpp. A thread reads only what it wrote itself.
__device__ bool normalise(const float* before, int64_t count, int64_t numel, float* vector) {
  const double length = block_norm(vector, numel);
  for (int64_t k = 0; k < 2 * count; ++k) {
    const float* other = before + k % count * numel;
    const double along = block_dot(other, vector, numel);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < numel; i += kTeam) {
      vector[i] = static_cast<float>(static_cast<double>(vector[i]) -
                                     along * static_cast<double>(other[i]));
    }
  }
  const double left = block_norm(vector, numel);
  if (length - length == 0 && left <= kDependent * length) return false;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < numel; i += kTeam) {
    vector[i] = static_cast<float>(static_cast<double>(vector[i]) / left);
  }
  return true;
}

__device__ void copy_vector(const float* from, float* to, int64_t numel) {
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < numel; i += kTeam) to[i] = from == nullptr ? 0 : from[i];
}

__global__ void __launch_bounds__(kTeam)
    orthonormalise_kernel(const __grid_constant__ SmallTable<VectorSet> table) {
  const VectorSet& set = table.job[blockIdx.x];
  const int64_t numel = set.numel;
#pragma unroll 1
  for (int64_t k = 0; k < set.count; ++k) {
    float* vector = set.vectors + k * numel;
    const float* other = set.refill == nullptr ? nullptr : set.refill + k * numel;
    if (other != nullptr) {
      const double length = block_norm(vector, numel);
      if (length - length != 0) copy_vector(other, vector, numel);
    }
    if (normalise(set.vectors, k, numel, vector)) continue;
    if (other != nullptr) {
      copy_vector(other, vector, numel);
      if (normalise(set.vectors, k, numel, vector)) continue;
    }
    copy_vector(nullptr, vector, numel);
  }
}

// --- Element by element ---

constexpr int kThreads = 256;
constexpr int kRounds = 4;  // elements per thread
constexpr int kTile = kThreads * kRounds;

__host__ __device__ __forceinline__ int64_t tiles_of(int64_t numel) {
  return (numel + kTile - 1) / kTile;
}

// visit(i) for this thread's elements of the tile.
template <class Visit>
__device__ __forceinline__ void each_of_tile(uint32_t tile, int64_t numel, const Visit& visit) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t i = static_cast<int64_t>(tile) * kTile + round * kThreads + threadIdx.x;
    if (i < numel) visit(i);
  }
}

__global__ void __launch_bounds__(kThreads)
    random_kernel(const __grid_constant__ SmallTable<RandomRun> table) {
  const int found = find_segment(table, blockIdx.x);
  const RandomRun& run = table.job[found];
  const uint64_t start = mixed(run.seed);
  each_of_tile(blockIdx.x - table.first_block[found], run.numel,
               [&](int64_t i) { run.values[i] = random_value(start, i); });
}

__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ SmallTable<LowRankJob> table) {
  const int found = find_segment(table, blockIdx.x);
  const LowRankJob& job = table.job[found];
  const LowRankArgs& args = job.args;
  const float used = job.used == nullptr || *job.used > 0 ? 1.0F : 0.0F;
  each_of_tile(blockIdx.x - table.first_block[found], args.rows * args.cols, [&](int64_t i) {
    const int64_t row = i / args.cols;
    const int64_t col = i - row * args.cols;
    float sum = 0;
    for (int64_t k = 0; k < args.rank; ++k) {
      sum += args.left[k * args.rows + row] * used * args.right[k * args.cols + col];
    }
    if (job.residual != nullptr) {
      job.residual[i] = finite_or(job.matrix[i] - args.share * sum, job.residual[i]);
    }
    job.matrix[i] = sum;
  });
}

}  // namespace

void orthonormalise_cuda(const VectorSet* sets, size_t count, CUstream_st* stream) {
  const auto blocks = [](const VectorSet& set) { return int64_t{set.count > 0}; };
  launch_tables(sets, count, blocks, [&](const auto& table, unsigned all) {
    FS_CUDA_LAUNCH_TEAMS(orthonormalise_kernel, all, kTeam, stream, table);
    FS_CUDA_CHECK(cudaGetLastError(), "orthonormalise_cuda: launching ", all, " blocks");
  });
}

void fill_random_cuda(const RandomRun* runs, size_t count, CUstream_st* stream) {
  const auto blocks = [](const RandomRun& run) { return tiles_of(run.numel); };
  launch_tables(runs, count, blocks, [&](const auto& table, unsigned all) {
    FS_CUDA_LAUNCH(random_kernel, all, kThreads, stream, table);
    FS_CUDA_CHECK(cudaGetLastError(), "fill_random_cuda: launching ", all, " blocks");
  });
}

void low_rank_product_cuda(const LowRankJob* jobs, size_t count, CUstream_st* stream) {
  const auto blocks = [](const LowRankJob& job) { return tiles_of(job.args.rows * job.args.cols); };
  launch_tables(jobs, count, blocks, [&](const auto& table, unsigned all) {
    FS_CUDA_LAUNCH(product_kernel, all, kThreads, stream, table);
    FS_CUDA_CHECK(cudaGetLastError(), "low_rank_product_cuda: launching ", all, " blocks");
  });
}

}  // namespace fastsync::kernels
