// Low-rank codes on the device: one launch serves all matrices of a bucket, as far as a table holds them
// ([Note: segment table]).
#include <cmath>
#include <cstdint>
#include <vector>

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

// --- A matrix times thin ones: memory-bound, so that each pass over the matrix serves several vectors ---

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kResident = 4;  // blocks per multiprocessor: at most 64 registers per thread
constexpr int kRanks = 4;     // vectors that a pass serves
constexpr int kEach = 4;      // rows, or columns, of the result per thread and pass
constexpr int kTileRows = kWarps * kEach;
constexpr int kTileCols = kWarp * kEach;

// Where a result alone would not fill a device, several blocks share a sum, and a further launch adds up theirs.
constexpr int64_t kEnoughBlocks = 512;
constexpr int64_t kLeastColsOfPart = 512;  // of a row: 16 for each thread of a warp
constexpr int64_t kLeastRowsOfPart = 128;  // of a column: 16 for each warp

struct Parts {
  int64_t tiles;  // of the result
  int64_t count;
  int64_t length;  // elements of a sum that are one part's
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Parts parts_of(Factor which, const FactorJob& job) {
  const bool left = which == Factor::kLeft;
  const int64_t length = left ? job.cols : job.rows;
  const int64_t tiles = left ? ceil_div(job.rows, kTileRows) : ceil_div(job.cols, kTileCols);
  const int64_t most = ceil_div(length, left ? kLeastColsOfPart : kLeastRowsOfPart);
  const int64_t wanted = ceil_div(kEnoughBlocks, tiles);
  const int64_t each = ceil_div(length, wanted < most ? wanted : most);
  return {tiles, ceil_div(length, each), each};
}

int64_t numel_of(Factor which, const FactorJob& job) {
  return job.rank * (which == Factor::kLeft ? job.rows : job.cols);
}

struct PartJob {
  FactorJob job;  // `out`: of part after part
  int64_t tiles;
  int64_t length;
};

// What a block computes: a tile of the result, summed over [begin, end).
struct Place {
  int64_t tile;
  int64_t part;
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ Place place_of(const PartJob& of, uint32_t block, int64_t total) {
  const int64_t part = block / of.tiles;
  const int64_t begin = part * of.length;
  const int64_t end = begin + of.length;
  return {block - part * of.tiles, part, begin, end < total ? end : total};
}

__device__ __forceinline__ int64_t at_most(int64_t i, int64_t last) { return i < last ? i : last; }

__device__ __forceinline__ float warp_sum(float mine) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    mine += float_of(__shfl_xor_sync(0xffffffff, bits_of(mine), lanes));
  }
  return mine;
}

// A warp takes kEach rows and its threads the columns. Rows and vectors that there are not stand for the last ones.
__global__ void __launch_bounds__(kThreads, kResident)
    left_kernel(const __grid_constant__ SmallTable<PartJob> table) {
  const int found = find_segment(table, blockIdx.x);
  const PartJob& of = table.job[found];
  const FactorJob& job = of.job;
  const Place place = place_of(of, blockIdx.x - table.first_block[found], job.cols);
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t row = place.tile * kTileRows + threadIdx.x / kWarp * kEach;
  float* out = job.out + place.part * job.rank * job.rows;
  const float* rows[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    rows[r] = job.matrix + at_most(row + r, job.rows - 1) * job.cols + place.begin;
  }
  const auto width = static_cast<uint32_t>(place.end - place.begin);
#pragma unroll 1
  for (int64_t first = 0; first < job.rank; first += kRanks) {
    const float* vectors[kRanks];
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      vectors[k] = job.factor + at_most(first + k, job.rank - 1) * job.cols + place.begin;
    }
    float sums[kEach][kRanks] = {};
#pragma unroll 1
    for (auto col = static_cast<uint32_t>(lane); col < width; col += kWarp) {
      float values[kEach];
      float factors[kRanks];
#pragma unroll
      for (int r = 0; r < kEach; ++r) values[r] = rows[r][col];
#pragma unroll
      for (int k = 0; k < kRanks; ++k) factors[k] = vectors[k][col];
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int k = 0; k < kRanks; ++k) sums[r][k] = fmaf(values[r], factors[k], sums[r][k]);
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
#pragma unroll
      for (int k = 0; k < kRanks; ++k) {
        const float sum = warp_sum(sums[r][k]);
        if (lane == 0 && row + r < job.rows && first + k < job.rank) {
          out[(first + k) * job.rows + row + r] = sum;
        }
      }
    }
  }
}

// A thread takes kEach columns, a warp apart, and the warps the rows; their sums meet in shared memory.
__global__ void __launch_bounds__(kThreads, kResident)
    right_kernel(const __grid_constant__ SmallTable<PartJob> table) {
  __shared__ float meeting[kWarps][kRanks][kTileCols];
  const int found = find_segment(table, blockIdx.x);
  const PartJob& of = table.job[found];
  const FactorJob& job = of.job;
  const Place place = place_of(of, blockIdx.x - table.first_block[found], job.rows);
  const int64_t lane = threadIdx.x % kWarp;
  const int64_t warp = threadIdx.x / kWarp;
  const int64_t col = place.tile * kTileCols + lane;
  float* out = job.out + place.part * job.rank * job.cols;
  const auto height = static_cast<uint32_t>(place.end - place.begin);
#pragma unroll 1
  for (int64_t first = 0; first < job.rank; first += kRanks) {
    const float* vectors[kRanks];
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      vectors[k] = job.factor + at_most(first + k, job.rank - 1) * job.rows + place.begin;
    }
    const float* columns[kEach];
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      columns[c] =
          job.matrix + (place.begin + warp) * job.cols + at_most(col + c * kWarp, job.cols - 1);
    }
    float sums[kRanks][kEach] = {};
#pragma unroll 1
    for (auto row = static_cast<uint32_t>(warp); row < height; row += kWarps) {
      float values[kEach];
      float factors[kRanks];
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        values[c] = *columns[c];
        columns[c] += kWarps * job.cols;
      }
#pragma unroll
      for (int k = 0; k < kRanks; ++k) factors[k] = vectors[k][row];
#pragma unroll
      for (int k = 0; k < kRanks; ++k) {
#pragma unroll
        for (int c = 0; c < kEach; ++c) sums[k][c] = fmaf(values[c], factors[k], sums[k][c]);
      }
    }
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
#pragma unroll
      for (int c = 0; c < kEach; ++c) meeting[warp][k][lane + c * kWarp] = sums[k][c];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kRanks * kTileCols; i += kThreads) {
      const int k = i / kTileCols;
      const int64_t to = place.tile * kTileCols + i % kTileCols;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += meeting[w][k][i % kTileCols];
      if (to < job.cols && first + k < job.rank) out[(first + k) * job.cols + to] = sum;
    }
    __syncthreads();  // the next pass must not overwrite what others still read
  }
}

struct SumJob {
  const float* parts;
  float* out;
  int64_t numel;  // of each part
  int64_t count;
};

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ SmallTable<SumJob> table) {
  const int found = find_segment(table, blockIdx.x);
  const SumJob& job = table.job[found];
  each_of_tile(blockIdx.x - table.first_block[found], job.numel, [&](int64_t i) {
    float sum = 0;
    for (int64_t part = 0; part < job.count; ++part) sum += job.parts[part * job.numel + i];
    job.out[i] = sum;
  });
}

}  // namespace

int64_t factor_scratch(Factor which, const FactorJob& job) {
  const int64_t parts = parts_of(which, job).count;
  return parts > 1 ? parts * numel_of(which, job) : 0;
}

void factors_cuda(Factor which, const FactorJob* jobs, size_t count, float* scratch,
                  CUstream_st* stream) {
  std::vector<PartJob> parted;
  std::vector<SumJob> sums;
  for (const FactorJob* job = jobs; job != jobs + count; ++job) {
    const Parts parts = parts_of(which, *job);
    parted.push_back({*job, parts.tiles, parts.length});
    if (parts.count == 1) continue;
    sums.push_back({scratch, job->out, numel_of(which, *job), parts.count});
    parted.back().job.out = scratch;
    scratch += factor_scratch(which, *job);
  }
  const auto blocks = [which](const PartJob& of) {
    return of.tiles * parts_of(which, of.job).count;
  };
  launch_tables(parted.data(), parted.size(), blocks, [&](const auto& table, unsigned all) {
    if (which == Factor::kLeft) {
      FS_CUDA_LAUNCH(left_kernel, all, kThreads, stream, table);
    } else {
      FS_CUDA_LAUNCH_TEAMS(right_kernel, all, kThreads, stream, table);
    }
    FS_CUDA_CHECK(cudaGetLastError(), "factors_cuda: launching ", all, " blocks");
  });
  const auto tiles = [](const SumJob& job) { return tiles_of(job.numel); };
  launch_tables(sums.data(), sums.size(), tiles, [&](const auto& table, unsigned all) {
    FS_CUDA_LAUNCH(sum_kernel, all, kThreads, stream, table);
    FS_CUDA_CHECK(cudaGetLastError(), "factors_cuda: launching ", all, " blocks");
  });
}

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
