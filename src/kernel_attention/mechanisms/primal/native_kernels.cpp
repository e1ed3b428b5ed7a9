// The pass of kernel_attention.mechanisms.primal.fused over the tokens, for processors.
//
// A thread takes slices of a few hundred tokens, whose features stay in its own cache. Products are those of the
// BLAS that PyTorch has; bias, norm and scale are one sweep between them. `native_kernels.py` calls this.
//
// Legend: B batch, N tokens, d width of x, h heads, p head width, k groups of heads mapped together, o outputs of a
// group, U units of work: parts of one sequence each. Matrices lie in rows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kSlice = 256;  // tokens; the time hardly differs from 128 to 512

struct Sizes {
  int64_t batch, length, width;  // B, N, d
  int64_t halves, head;          // 2h, p
  int64_t groups, outputs;       // k, o
  int64_t maps;                  // B, or 1 where the maps are shared
  int64_t parts;                 // of a sequence: U = B parts
  int64_t threads;
  int64_t normalize;

  int64_t all() const { return halves * head; }         // features of a token
  int64_t deep() const { return all() / groups; }       // features that a group reads
  int64_t wide() const { return groups * outputs; }     // outputs of a token
  int64_t map() const { return all() * outputs; }       // numbers of a sequence's maps
};

// sgemm_ or dgemm_ of a BLAS with 32-bit sizes.
template <typename T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*,
                      const T*, const int*, const T*, T*, const int*);

template <typename T>
struct Matrix {
  const T* data;
  int64_t stride;  // from row to row
  bool transposed = false;
};

// C (m, n) = A (m, k) B (k, n) + beta C. BLAS reads columns, so it multiplies the transposes in the other order.
template <typename T>
void multiply(Gemm<T> gemm, int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b, T beta, T* c, int64_t stride) {
  const int rows = int(m), columns = int(n), depth = int(k), of_a = int(a.stride), of_b = int(b.stride),
            of_c = int(stride);
  const T one = 1;
  gemm(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &columns, &rows, &depth, &one, b.data, &of_b, a.data, &of_a,
       &beta, c, &of_c);
}

// 1 / |row| where the squares leave the range of T; 0 for a row of zeros.
template <typename T>
T balanced_inverse_norm(const T* row, int64_t size) {
  T largest = 0, sum = 0;
  for (int64_t j = 0; j < size; ++j) largest = std::max(largest, std::abs(row[j]));
  if (largest < std::numeric_limits<T>::min()) return 0;
  const T scale = 1 / largest;
  for (int64_t j = 0; j < size; ++j) sum += (row[j] * scale) * (row[j] * scale);
  return scale / std::sqrt(sum);
}

// The head width as a constant where it is a usual one: the compiler lays out the loops over it.
template <typename Call>
void with_head(int64_t head, Call call) {
  switch (head) {
    case 16: return call(std::integral_constant<int64_t, 16>());
    case 32: return call(std::integral_constant<int64_t, 32>());
    case 64: return call(std::integral_constant<int64_t, 64>());
    default: return call(head);
  }
}

// Projections z (n, 2h, p) become features: + bias, / norm; zero at padding. `scales` (n, 2h) gets 1 / norm.
template <typename T>
void to_features(const Sizes& sizes, T* z, const T* bias, const uint8_t* mask, T* scales, int64_t rows) {
  const T low = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
  const T high = std::numeric_limits<T>::infinity();
  with_head(sizes.head, [&](auto size) {
    const int64_t p = size;
    for (int64_t i = 0; i < rows * sizes.halves; ++i) {
      T* row = z + i * p;
      const T* shift = bias ? bias + i % sizes.halves * p : nullptr;
      T scale = 1, sum = 0;
      if (mask && !mask[i / sizes.halves]) {
        std::fill_n(row, p, T(0));
        scale = 0;
      } else if (shift) {
#pragma omp simd
        for (int64_t j = 0; j < p; ++j) row[j] += shift[j];
      }
      if (sizes.normalize && scale != 0) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < p; ++j) sum += row[j] * row[j];
        scale = sum > low && sum < high ? 1 / std::sqrt(sum) : balanced_inverse_norm(row, p);
#pragma omp simd
        for (int64_t j = 0; j < p; ++j) row[j] *= scale;
      }
      scales[i] = scale;
    }
  });
}

// The gradient of the features becomes that of the projections: (dz - u <u, dz>) / norm. `sum` (2h p) gets its rows.
template <typename T>
void features_back(const Sizes& sizes, T* grad, const T* z, const T* scales, T* sum, int64_t rows) {
  with_head(sizes.head, [&](auto size) {
    const int64_t p = size;
    for (int64_t i = 0; i < rows * sizes.halves; ++i) {
      T* g = grad + i * p;
      const T* u = z + i * p;
      T* total = sum + i % sizes.halves * p;
      T along = 0;
      if (sizes.normalize) {
#pragma omp simd reduction(+ : along)
        for (int64_t j = 0; j < p; ++j) along += u[j] * g[j];
      }
#pragma omp simd
      for (int64_t j = 0; j < p; ++j) {
        g[j] = (g[j] - u[j] * along) * scales[i];
        total[j] += g[j];
      }
    }
  });
}

template <typename T>
void add_rows(T* sum, const T* rows, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) sum[j] += rows[i * size + j];
  }
}

// One slice of tokens in one thread: its place, and room for what is computed of it.
template <typename T>
struct Slice {
  int64_t unit, sequence, first, rows;  // `first` counts the tokens of all sequences
  const uint8_t* mask;
  const T* x;
  std::vector<T> z, grad, scales, sum, real;

  explicit Slice(const Sizes& sizes)
      : z(kSlice * sizes.all()), grad(kSlice * sizes.all()), scales(kSlice * sizes.halves),
        sum(std::max(sizes.all(), sizes.wide())) {}

  // Padding may hold any value, also NaN: the products read zeros there.
  void read(const Sizes& sizes, const T* tokens) {
    x = tokens + first * sizes.width;
    if (!mask || std::all_of(mask, mask + rows, [](uint8_t is_real) { return is_real; })) return;
    real.assign(kSlice * sizes.width, T(0));
    for (int64_t i = 0; i < rows; ++i)
      if (mask[i]) std::copy_n(x + i * sizes.width, sizes.width, real.begin() + i * sizes.width);
    x = real.data();
  }
};

// Calls `work` with every slice of every unit, a unit's slices in order. A thread takes the next unit when it is done
// with one: sums are those of units, so which thread makes them does not change a bit.
template <typename T, typename Work>
void over_slices(const Sizes& sizes, const T* x, const uint8_t* mask, Work work) {
#pragma omp parallel num_threads(int(sizes.threads))
  {
    Slice<T> slice(sizes);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < sizes.batch * sizes.parts; ++unit) {
      const int64_t sequence = unit / sizes.parts, part = unit % sizes.parts;
      const int64_t end = sizes.length * (part + 1) / sizes.parts;
      for (int64_t from = sizes.length * part / sizes.parts; from < end; from += kSlice) {
        slice.unit = unit, slice.sequence = sequence;
        slice.first = sequence * sizes.length + from, slice.rows = std::min(kSlice, end - from);
        slice.mask = mask ? mask + slice.first : nullptr;
        slice.read(sizes, x);
        work(slice);
      }
    }
  }
}

template <typename T>
struct Pass {
  Gemm<T> gemm;
  Sizes sizes;
  const T *x, *weight, *bias, *maps;  // (B, N, d), (2h p, d), (2h p) or null, (B or 1, k, 2h p / k, o)
  const uint8_t* mask;                // (B, N) or null

  const T* own_maps(const Slice<T>& slice) const {
    return maps + (sizes.maps == 1 ? 0 : slice.sequence * sizes.map());
  }

  void fill_features(Slice<T>& slice) const {
    multiply<T>(gemm, slice.rows, sizes.all(), sizes.width, {slice.x, sizes.width}, {weight, sizes.width, true}, 0,
                slice.z.data(), sizes.all());
    to_features(sizes, slice.z.data(), bias, slice.mask, slice.scales.data(), slice.rows);
  }

  // y (B, N, k o) = z maps + constant; grams (U, 2h, p, p), zero at first, or null.
  void map_tokens(const T* constant, T* y, T* grams) const {
    const int64_t all = sizes.all(), deep = sizes.deep(), p = sizes.head, o = sizes.outputs, wide = sizes.wide();
    over_slices(sizes, x, mask, [&](Slice<T>& slice) {
      fill_features(slice);
      const T *z = slice.z.data(), *own = own_maps(slice);
      T* out = y + slice.first * wide;
      for (int64_t i = 0; i < slice.rows; ++i) std::copy_n(constant, wide, out + i * wide);
      for (int64_t g = 0; g < sizes.groups; ++g)
        multiply<T>(gemm, slice.rows, o, deep, {z + g * deep, all}, {own + g * deep * o, o}, 1, out + g * o, wide);
      for (int64_t a = 0; grams && a < sizes.halves; ++a)
        multiply<T>(gemm, p, p, slice.rows, {z + a * p, all, true}, {z + a * p, all}, 1,
                    grams + (slice.unit * sizes.halves + a) * p * p, p);
    });
  }

  // The gradients; those of weight, bias, maps and constant are sums of every unit (U, ..), zero at first. `pulls`
  // (B, 2h, p, p) is twice the gradient of the Gram matrices, or null.
  void pull_back(const T* pulls, const T* grad_y, T* grad_x, T* grad_weight, T* grad_bias, T* grad_maps,
                 T* grad_constant) const {
    const int64_t all = sizes.all(), deep = sizes.deep(), p = sizes.head, o = sizes.outputs, wide = sizes.wide(),
                  d = sizes.width;
    over_slices(sizes, x, mask, [&](Slice<T>& slice) {
      fill_features(slice);
      const T *z = slice.z.data(), *own = own_maps(slice), *out = grad_y + slice.first * wide;
      T *grad = slice.grad.data(), *sum = slice.sum.data();
      // The rows of a slice are summed by themselves first: long sums would lose digits.
      std::fill(slice.sum.begin(), slice.sum.end(), T(0));
      add_rows(sum, out, slice.rows, wide);
      add_rows(grad_constant + slice.unit * wide, sum, 1, wide);
      for (int64_t g = 0; g < sizes.groups; ++g) {
        multiply<T>(gemm, deep, o, slice.rows, {z + g * deep, all, true}, {out + g * o, wide}, 1,
                    grad_maps + slice.unit * sizes.map() + g * deep * o, o);
        multiply<T>(gemm, slice.rows, deep, o, {out + g * o, wide}, {own + g * deep * o, o, true}, 0, grad + g * deep,
                    all);
      }
      for (int64_t a = 0; pulls && a < sizes.halves; ++a)
        multiply<T>(gemm, slice.rows, p, p, {z + a * p, all}, {pulls + (slice.sequence * sizes.halves + a) * p * p, p},
                    1, grad + a * p, all);
      std::fill(slice.sum.begin(), slice.sum.end(), T(0));
      features_back(sizes, grad, z, slice.scales.data(), sum, slice.rows);
      add_rows(grad_bias + slice.unit * all, sum, 1, all);
      multiply<T>(gemm, slice.rows, d, all, {grad, all}, {weight, d}, 0, grad_x + slice.first * d, d);
      multiply<T>(gemm, all, d, slice.rows, {grad, all, true}, {slice.x, d}, 1, grad_weight + slice.unit * all * d, d);
    });
  }
};

}  // namespace

#define KERNELS_OF(T)                                                                                              \
  extern "C" void map_tokens_##T(Gemm<T> gemm, const Sizes* sizes, const T* x, const T* weight, const T* bias,      \
                                 const T* maps, const uint8_t* mask, const T* constant, T* y, T* grams) {           \
    Pass<T>{gemm, *sizes, x, weight, bias, maps, mask}.map_tokens(constant, y, grams);                              \
  }                                                                                                                 \
  extern "C" void pull_back_##T(Gemm<T> gemm, const Sizes* sizes, const T* x, const T* weight, const T* bias,       \
                                const T* maps, const uint8_t* mask, const T* pulls, const T* grad_y, T* grad_x,     \
                                T* grad_weight, T* grad_bias, T* grad_maps, T* grad_constant) {                     \
    Pass<T>{gemm, *sizes, x, weight, bias, maps, mask}.pull_back(pulls, grad_y, grad_x, grad_weight, grad_bias,     \
                                                                 grad_maps, grad_constant);                         \
  }
KERNELS_OF(float)
KERNELS_OF(double)
