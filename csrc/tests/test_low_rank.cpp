// Orthonormal vectors, random first factors, and products of thin matrices: properties and sums in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../kernels/low_rank.h"
#include "harness.h"
#include "pack_model.h"

namespace fastsync::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kEpsilon = 6e-8;  // half a unit in the last place of fp32, relatively

float number(Random& random) {
  return std::ldexp(static_cast<float>(static_cast<int64_t>(random.next() % (1U << 24))) -
                        static_cast<float>(1U << 23),
                    -23);
}

// Floats between guards.
class Floats {
 public:
  explicit Floats(int64_t numel, int shift = 1)
      : numel_(numel), memory_(DType::kFloat32, numel, shift) {}
  Floats(int64_t numel, Random& random) : Floats(numel) {
    for (int64_t i = 0; i < numel; ++i) set(i, number(random));
  }
  explicit Floats(const std::vector<float>& values) : Floats(static_cast<int64_t>(values.size())) {
    std::memcpy(memory_.data(), values.data(), values.size() * sizeof(float));
  }

  float* data() { return reinterpret_cast<float*>(memory_.data()); }
  int64_t numel() const { return numel_; }
  double operator[](int64_t i) { return static_cast<double>(data()[i]); }
  void set(int64_t i, float value) { data()[i] = value; }
  std::vector<float> copy() { return {data(), data() + numel_}; }
  bool equals(Floats& other) { return std::equal(data(), data() + numel_, other.data()); }
  void check_guards() { memory_.check_guards(); }

 private:
  int64_t numel_;
  GuardedBuffer memory_;
};

using Vector = std::vector<long double>;

Vector vector_in(const std::vector<float>& all, int64_t k, int64_t numel) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(k * numel);
  return {first, first + static_cast<std::ptrdiff_t>(numel)};
}

long double dot(const Vector& a, const Vector& b) {
  long double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

std::vector<float> orthonormal(const std::vector<float>& vectors, int64_t count, int64_t numel,
                               const std::vector<float>& refill = {}) {
  Floats found(vectors);
  kernels::orthonormalise_cpu(found.data(), count, numel, refill.empty() ? nullptr : refill.data());
  found.check_guards();
  return found.copy();
}

void expect_orthonormal(const std::vector<float>& vectors, int64_t count, int64_t numel) {
  for (int64_t a = 0; a < count; ++a) {
    for (int64_t b = 0; b <= a; ++b) {
      const long double product =
          dot(vector_in(vectors, a, numel), vector_in(vectors, b, numel)) - (a == b ? 1 : 0);
      EXPECT(std::fabs(product) < 1e-6L, "vectors ", a, " and ", b, " of ", count, " x ", numel,
             " are off by ", static_cast<double>(product));
    }
  }
}

// With orthonormality, this is what Gram-Schmidt is: vector k lies among the first k + 1 found, and on its own one's side.
void expect_same_spans(const std::vector<float>& from, const std::vector<float>& found,
                       int64_t count, int64_t numel) {
  for (int64_t k = 0; k < count; ++k) {
    const Vector original = vector_in(from, k, numel);
    Vector left = original;
    for (int64_t j = 0; j <= k; ++j) {
      const Vector unit = vector_in(found, j, numel);
      const long double along = dot(unit, left);
      for (size_t i = 0; i < left.size(); ++i) left[i] -= along * unit[i];
      EXPECT(j < k || along > 0, "vector ", k, " of ", count, " x ", numel, " was turned round");
    }
    const long double lost = dot(left, left) / dot(original, original);
    EXPECT(lost < 1e-12L, "vector ", k, " of ", count, " x ", numel, " left its span by ",
           static_cast<double>(lost));
  }
}

std::vector<float> random_vectors(int64_t numel, Random& random) {
  return Floats(numel, random).copy();
}

void is_gram_schmidt() {
  Random random;
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {1, 7},   {2, 8},   {3, 9},
                                               {5, 5}, {4, 300}, {7, 1001}};
  for (const auto& [count, numel] : sizes) {
    for (const float scale : {1.0F, 1e-30F, 1e30F}) {
      std::vector<float> vectors = random_vectors(count * numel, random);
      for (float& value : vectors) value *= scale;
      const std::vector<float> found = orthonormal(vectors, count, numel);
      expect_orthonormal(found, count, numel);
      expect_same_spans(vectors, found, count, numel);
    }
  }
}

// One pass would leave the second vector a thousand times less orthogonal than rounding does.
void nearly_dependent_vectors_become_orthogonal() {
  constexpr int64_t numel = 501;
  Random random;
  std::vector<float> vectors = random_vectors(3 * numel, random);
  for (size_t i = 0; i < numel; ++i) {
    vectors[numel + i] = vectors[i] + 1e-4F * vectors[numel + i];
    vectors[2 * numel + i] = vectors[i] - 1e-4F * vectors[2 * numel + i];
  }
  expect_orthonormal(orthonormal(vectors, 3, numel), 3, numel);
}

// The second of three vectors is twice the first.
std::vector<float> dependent_vectors(int64_t numel, Random& random) {
  std::vector<float> vectors = random_vectors(3 * numel, random);
  for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
    vectors[static_cast<size_t>(numel) + i] = 2 * vectors[i];
  }
  return vectors;
}

bool is_zero(const Vector& vector) { return dot(vector, vector) == 0; }

void dependent_vectors_vanish() {
  Random random;
  for (const int64_t numel : {3, 50, 513}) {
    const std::vector<float> found = orthonormal(dependent_vectors(numel, random), 3, numel);
    EXPECT(is_zero(vector_in(found, 1, numel)), "a dependent vector of ", numel, " did not vanish");
    const Vector first = vector_in(found, 0, numel);
    const Vector last = vector_in(found, 2, numel);
    EXPECT(std::fabs(dot(last, last) - 1) < 1e-6L && std::fabs(dot(first, last)) < 1e-6L,
           "the vector after it suffered");
  }
  const std::vector<float> more = orthonormal(random_vectors(5 * 2, random), 5, 2);
  expect_orthonormal(more, 2, 2);
  for (int64_t k = 2; k < 5; ++k) {
    EXPECT(is_zero(vector_in(more, k, 2)), "a third vector of two elements");
  }
  EXPECT(is_zero(vector_in(orthonormal(std::vector<float>(9), 1, 9), 0, 9)), "nothing became some");
}

void dependent_vectors_are_replaced() {
  constexpr int64_t numel = 50;
  Random random;
  const std::vector<float> vectors = dependent_vectors(numel, random);
  const std::vector<float> refill = random_vectors(3 * numel, random);
  const std::vector<float> found = orthonormal(vectors, 3, numel, refill);
  std::vector<float> wanted = vectors;
  std::copy(refill.begin() + numel, refill.begin() + 2 * numel, wanted.begin() + numel);
  expect_orthonormal(found, 3, numel);
  expect_same_spans(wanted, found, 3, numel);
  EXPECT(found == orthonormal(wanted, 3, numel), "vectors that are independent suffered");
  const std::vector<float> useless = orthonormal(vectors, 3, numel, vectors);
  EXPECT(is_zero(vector_in(useless, 1, numel)), "replaced by what depends, too");
}

void poison_is_replaced() {
  constexpr int64_t numel = 65;
  Random random;
  const std::vector<float> refill = random_vectors(3 * numel, random);
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    std::vector<float> vectors = random_vectors(3 * numel, random);
    vectors[numel + 64] = value;
    const std::vector<float> found = orthonormal(vectors, 3, numel, refill);
    std::copy(refill.begin() + numel, refill.begin() + 2 * numel, vectors.begin() + numel);
    expect_orthonormal(found, 3, numel);
    expect_same_spans(vectors, found, 3, numel);
  }
}

// Without a refill it must reach every later vector: a gradient that is not finite is not finite in the average.
void poison_spreads() {
  constexpr int64_t numel = 65;
  Random random;
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    std::vector<float> vectors = random_vectors(3 * numel, random);
    vectors[64] = value;
    const std::vector<float> found = orthonormal(vectors, 3, numel);
    for (int64_t k = 0; k < 3; ++k) {
      const Vector vector = vector_in(found, k, numel);
      EXPECT(!std::isfinite(dot(vector, vector)), "vector ", k, " is finite after ", value);
    }
  }
}

// Numbers worked out from the definition of SplitMix64 by other means: every machine must draw them.
void draws_the_same_everywhere() {
  Floats found(4);
  kernels::fill_random(found.data(), 4, 0);
  const double of_zero[] = {2557661 / 0x1p23, -5596939 / 0x1p23, 165742 / 0x1p23, 7978769 / 0x1p23};
  for (int64_t i = 0; i < 4; ++i) EXPECT(found[i] == of_zero[i], "number ", i, " is ", found[i]);
  kernels::fill_random(found.data(), 4, (uint64_t{5} << 32) + 7);
  const double of_another[] = {6203012 / 0x1p23, 5634320 / 0x1p23, -7733229 / 0x1p23,
                               4357285 / 0x1p23};
  for (int64_t i = 0; i < 4; ++i) EXPECT(found[i] == of_another[i], "number ", i, " is ", found[i]);
  found.check_guards();
}

void draws_uniformly() {
  constexpr int64_t numel = 100003;
  Floats found(numel);
  kernels::fill_random(found.data(), numel, 11);
  int64_t bins[16] = {};
  for (int64_t i = 0; i < numel; ++i) {
    EXPECT(found[i] >= -1 && found[i] < 1, "number ", i, " is ", found[i]);
    ++bins[static_cast<size_t>((found[i] + 1) * 8)];
  }
  for (const int64_t bin : bins) {  // six standard deviations
    EXPECT(std::abs(static_cast<double>(bin) - numel / 16.0) < 6 * std::sqrt(numel / 16.0), bin,
           " numbers in a sixteenth of the range");
  }
}

struct Product {
  int64_t rank;
  int64_t rows;
  int64_t cols;
};

constexpr Product kProducts[] = {{1, 1, 1},   {1, 3, 7},    {2, 5, 511}, {3, 4, 512},
                                 {4, 9, 513}, {8, 2, 1100}, {3, 70, 17}};

struct Sum {
  double value = 0;
  double magnitudes = 0;
};

Sum sum_at(const kernels::LowRankArgs& args, int64_t row, int64_t col) {
  Sum sum;
  for (int64_t k = 0; k < args.rank; ++k) {
    const double term = static_cast<double>(args.left[k * args.rows + row]) *
                        static_cast<double>(args.right[k * args.cols + col]);
    sum.value += term;
    sum.magnitudes += std::fabs(term);
  }
  return sum;
}

// Factors, a matrix that is replaced by their product, and a residual.
struct Fixture {
  Fixture(const Product& size, Random& random)
      : left(size.rank * size.rows, random),
        right(size.rank * size.cols, random),
        matrix(size.rows * size.cols, random),
        residual(size.rows * size.cols, random),
        args{left.data(), right.data(), size.rank, size.rows, size.cols, 0.25F} {}

  void multiply(int64_t begin, int64_t end, bool with_residual = true) {
    kernels::low_rank_product_cpu(args, begin, end, matrix.data(),
                                  with_residual ? residual.data() : nullptr);
    matrix.check_guards();
    residual.check_guards();
  }

  Floats left;
  Floats right;
  Floats matrix;
  Floats residual;
  kernels::LowRankArgs args;
};

void multiplies_and_keeps_what_is_lost() {
  Random random;
  for (const Product& size : kProducts) {
    Fixture fixture(size, random);
    const std::vector<float> before = fixture.matrix.copy();
    fixture.multiply(0, size.rows);
    for (int64_t i = 0; i < size.rows * size.cols; ++i) {
      const Sum sum = sum_at(fixture.args, i / size.cols, i % size.cols);
      const double bound = 2 * kEpsilon * static_cast<double>(size.rank) * sum.magnitudes;
      EXPECT(std::fabs(fixture.matrix[i] - sum.value) <= bound, "element ", i, " of ", size.rows,
             " x ", size.cols, " is ", fixture.matrix[i], " instead of ", sum.value);
      const auto was = static_cast<double>(before[static_cast<size_t>(i)]);
      const double lost = was - 0.25 * fixture.matrix[i];
      EXPECT(std::fabs(fixture.residual[i] - lost) <= kEpsilon * std::fabs(lost), "residual ", i,
             " is ", fixture.residual[i], " instead of ", lost);
    }
  }
}

// Threads take rows as they come, and other ranks have other threads: parts must give the bits of the whole.
void rows_do_not_depend_on_others() {
  Random random;
  for (const Product& size : kProducts) {
    Random again = random;
    Fixture whole(size, again);
    Fixture parts(size, random);
    whole.multiply(0, size.rows);
    const std::vector<float> before = parts.matrix.copy();
    const std::vector<float> kept = parts.residual.copy();
    const int64_t middle = size.rows / 2;
    parts.multiply(middle, size.rows);
    const auto others = static_cast<std::ptrdiff_t>(middle * size.cols);
    const auto untouched = [&](const std::vector<float>& was, const std::vector<float>& is) {
      return std::equal(was.begin(), was.begin() + others, is.begin());
    };
    EXPECT(untouched(before, parts.matrix.copy()), "another row of the matrix was written");
    EXPECT(untouched(kept, parts.residual.copy()), "another row of the residual was written");
    parts.multiply(0, middle);
    EXPECT(parts.matrix.equals(whole.matrix), "a product in parts differs");
    EXPECT(parts.residual.equals(whole.residual), "a residual in parts differs");
  }
}

void does_without_a_residual() {
  Random random;
  const Product size{3, 5, 600};
  Random again = random;
  Fixture with(size, random);
  Fixture without(size, again);
  const std::vector<float> kept = without.residual.copy();
  with.multiply(0, size.rows);
  without.multiply(0, size.rows, false);
  EXPECT(with.matrix.equals(without.matrix), "the product depends on the residual");
  EXPECT(without.residual.copy() == kept, "a residual that was not given");
}

// It arrives in the product, and leaves the residual as it was.
void poison_does_not_stay() {
  Random random;
  for (const float value : {kNan, kInfinity}) {
    Fixture fixture({2, 4, 700}, random);
    const std::vector<float> kept = fixture.residual.copy();
    fixture.left.set(1, value);          // row 1
    fixture.matrix.set(3 * 700, value);  // one element of row 3
    fixture.multiply(0, 4);
    for (int64_t i = 0; i < 4 * 700; ++i) {
      const bool poisoned = i / 700 == 1;
      EXPECT(std::isfinite(fixture.matrix[i]) == !poisoned, "element ", i);
      EXPECT(std::isfinite(fixture.residual[i]), "residual ", i);
      if (!poisoned && i != 3 * 700) continue;
      EXPECT(fixture.residual.copy()[static_cast<size_t>(i)] == kept[static_cast<size_t>(i)],
             "residual ", i, " changed");
    }
  }
}

// --- The CUDA kernels, run on the host, against the CPU's ---

bool near(double a, double b) { return a == b || (a != a && b != b) || std::abs(a - b) < 1e-6; }

void expect_near(Floats& found, Floats& wanted, const char* what) {
  for (int64_t i = 0; i < wanted.numel(); ++i) {
    EXPECT(near(found[i], wanted[i]), what, ": element ", i, " is ", found[i], " but ", wanted[i],
           " on the CPU");
  }
  found.check_guards();
}

// Vectors of every kind: independent, multiples of one another, poisoned.
struct Set {
  Set(int64_t vectors, int64_t elements, bool refilled, Random& random)
      : count(vectors), numel(elements), cpu(count * numel, random), refill(count * numel, random) {
    for (int64_t i = 0; i < numel && count > 2; ++i) {
      cpu.set(numel + i, 2 * static_cast<float>(cpu[i]));
    }
    if (refilled && count > 3) cpu.set(3 * numel, kNan);
    cuda = std::make_unique<Floats>(cpu.copy());
    other = refilled ? refill.data() : nullptr;
  }

  int64_t count;
  int64_t numel;
  Floats cpu;
  Floats refill;
  std::unique_ptr<Floats> cuda;
  const float* other = nullptr;
};

void cuda_makes_the_same_vectors() {
  Random random;
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {4, 60}, {3, 1024}, {2, 1025}, {3, 2500}};
  std::vector<std::unique_ptr<Set>> sets;
  std::vector<kernels::VectorSet> table;
  for (const auto& [count, numel] : sizes) {
    sets.push_back(std::make_unique<Set>(count, numel, numel != 1024, random));
    Set& set = *sets.back();
    table.push_back({set.cuda->data(), set.other, count, numel});
    kernels::orthonormalise_cpu(set.cpu.data(), count, numel, set.other);
  }
  kernels::orthonormalise_cuda(table.data(), table.size(), nullptr);
  for (const auto& set : sets) expect_near(*set->cuda, set->cpu, "a vector");
}

void cuda_draws_the_same_numbers() {
  std::vector<std::unique_ptr<Floats>> all;
  std::vector<kernels::RandomRun> runs;
  for (int64_t i = 0; i < 400; ++i) {  // more than one table holds
    all.push_back(std::make_unique<Floats>(i % 7 == 6 ? 1030 : i % 7));
    runs.push_back({all.back()->data(), all.back()->numel(), static_cast<uint64_t>(i) << 40});
  }
  kernels::fill_random_cuda(runs.data(), runs.size(), nullptr);
  for (const kernels::RandomRun& run : runs) {
    Floats wanted(run.numel);
    kernels::fill_random(wanted.data(), run.numel, run.seed);
    EXPECT(std::equal(run.values, run.values + run.numel, wanted.data()), "other numbers");
  }
  for (const auto& floats : all) floats->check_guards();
}

void cuda_multiplies_the_same() {
  Random random;
  for (const bool kept : {false, true}) {
    for (const float used : {0.0F, 2.0F}) {
      const int64_t rank = 3, rows = 37, cols = 61;
      Floats left(rank * rows, random), right(rank * cols, random), flag(std::vector<float>{used});
      Floats matrix(rows * cols, random), residual(rows * cols, random);
      matrix.set(5, kInfinity);
      Floats cuda(matrix.copy()), lost(residual.copy());
      const kernels::LowRankArgs args{left.data(), right.data(), rank, rows, cols, 0.5F};
      const kernels::LowRankJob job{args, cuda.data(), kept ? lost.data() : nullptr, flag.data()};
      kernels::low_rank_product_cuda(&job, 1, nullptr);
      for (int64_t i = 0; i < left.numel() && used == 0; ++i) left.set(i, 0);
      kernels::low_rank_product_cpu(args, 0, rows, matrix.data(), kept ? residual.data() : nullptr);
      EXPECT(cuda.equals(matrix) && lost.equals(residual), "another product, or residual");
      cuda.check_guards();
      lost.check_guards();
    }
  }
}

// Factors of a matrix in double, with what their terms' sizes add up to.
Sum factor_at(kernels::Factor which, const kernels::FactorJob& job, int64_t k, int64_t i) {
  const bool left = which == kernels::Factor::kLeft;
  Sum sum;
  for (int64_t j = 0; j < (left ? job.cols : job.rows); ++j) {
    const float element = left ? job.matrix[i * job.cols + j] : job.matrix[j * job.cols + i];
    const double term = static_cast<double>(element) *
                        static_cast<double>(job.factor[k * (left ? job.cols : job.rows) + j]);
    sum.value += term;
    sum.magnitudes += std::fabs(term);
  }
  return sum;
}

struct FactorFixture {
  FactorFixture(kernels::Factor which, const Product& size, Random& random)
      : matrix(size.rows * size.cols, random),
        factor(size.rank * (which == kernels::Factor::kLeft ? size.cols : size.rows), random),
        out(size.rank * (which == kernels::Factor::kLeft ? size.rows : size.cols)),
        job{matrix.data(), factor.data(), out.data(), size.rank, size.rows, size.cols} {}

  void check(kernels::Factor which) {
    const int64_t each = which == kernels::Factor::kLeft ? job.rows : job.cols;
    for (int64_t i = 0; i < out.numel(); ++i) {
      const Sum sum = factor_at(which, job, i / each, i % each);
      const double bound = 100 * kEpsilon * sum.magnitudes;
      EXPECT(std::fabs(out[i] - sum.value) <= bound, "element ", i, " of a factor of ", job.rows,
             " x ", job.cols, ", rank ", job.rank, ", is ", out[i], " instead of ", sum.value);
    }
    out.check_guards();
  }

  Floats matrix;
  Floats factor;
  Floats out;
  kernels::FactorJob job;
};

// Sizes beside those of a tile; parts that share a sum; ranks that take several passes; more matrices than one table holds.
void cuda_makes_factors() {
  Random random;
  std::vector<Product> sizes = {{1, 1, 1},    {4, 32, 128}, {4, 33, 129},  {5, 3, 1300},
                                {2, 700, 5},  {9, 65, 40},  {16, 31, 127}, {3, 8, 2049},
                                {4, 513, 12}, {1, 260, 600}};
  for (int64_t i = 0; i < 80; ++i) sizes.push_back({1 + i % 4, 1 + i % 9, 1 + i % 13});
  for (const auto which : {kernels::Factor::kLeft, kernels::Factor::kRight}) {
    std::vector<std::unique_ptr<FactorFixture>> fixtures;
    std::vector<kernels::FactorJob> jobs;
    int64_t floats = 0;
    for (const Product& size : sizes) {
      fixtures.push_back(std::make_unique<FactorFixture>(which, size, random));
      jobs.push_back(fixtures.back()->job);
      floats += kernels::factor_scratch(which, jobs.back());
    }
    EXPECT(floats > 0, "no sum is shared");
    Floats scratch(floats);
    kernels::factors_cuda(which, jobs.data(), jobs.size(), scratch.data(), nullptr);
    for (const auto& fixture : fixtures) fixture->check(which);
    scratch.check_guards();
  }
}

// A gradient that is not finite must be seen by all ranks.
void cuda_factors_keep_poison() {
  Random random;
  for (const auto which : {kernels::Factor::kLeft, kernels::Factor::kRight}) {
    FactorFixture fixture(which, {3, 40, 600}, random);
    fixture.matrix.set(7 * 600 + 550, kNan);
    Floats scratch(kernels::factor_scratch(which, fixture.job));
    kernels::factors_cuda(which, &fixture.job, 1, scratch.data(), nullptr);
    const int64_t each = which == kernels::Factor::kLeft ? 40 : 600;
    for (int64_t i = 0; i < fixture.out.numel(); ++i) {
      const bool poisoned = i % each == (which == kernels::Factor::kLeft ? 7 : 550);
      EXPECT(std::isfinite(fixture.out[i]) == !poisoned, "element ", i, " is ", fixture.out[i]);
    }
  }
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  const std::vector<Case> cases = {
      {"is_gram_schmidt", is_gram_schmidt},
      {"nearly_dependent_vectors_become_orthogonal", nearly_dependent_vectors_become_orthogonal},
      {"dependent_vectors_vanish", dependent_vectors_vanish},
      {"dependent_vectors_are_replaced", dependent_vectors_are_replaced},
      {"poison_is_replaced", poison_is_replaced},
      {"poison_spreads", poison_spreads},
      {"draws_the_same_everywhere", draws_the_same_everywhere},
      {"draws_uniformly", draws_uniformly},
      {"multiplies_and_keeps_what_is_lost", multiplies_and_keeps_what_is_lost},
      {"rows_do_not_depend_on_others", rows_do_not_depend_on_others},
      {"does_without_a_residual", does_without_a_residual},
      {"poison_does_not_stay", poison_does_not_stay},
      {"cuda_makes_the_same_vectors", cuda_makes_the_same_vectors},
      {"cuda_draws_the_same_numbers", cuda_draws_the_same_numbers},
      {"cuda_multiplies_the_same", cuda_multiplies_the_same},
      {"cuda_makes_factors", cuda_makes_factors},
      {"cuda_factors_keep_poison", cuda_factors_keep_poison},
  };
  return run_cases(cases, argc, argv);
}
