// kernel_attention.mechanisms.primal.one_pass for processors: the weights multiplied out, and the pass over the tokens.
//
// A thread takes slices of a few hundred tokens, whose features stay in its own cache. Products are those of the
// BLAS that PyTorch has; bias, norm and scale are one sweep between them. `native.py` calls this.
//
// Legend: B batch, N tokens, d width of x, h heads, p head width, s rank, M sampled rows, k groups of heads mapped
// together, o outputs of a group, U units of work: parts of one sequence each. Matrices lie in rows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

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
  // Tokens of a slice: their features take a quarter of a megabyte in float32. Half and twice that took 2 to 4 % more.
  int64_t slice() const { return std::max<int64_t>(128, 65536 / all()); }
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
      : z(sizes.slice() * sizes.all()), grad(sizes.slice() * sizes.all()), scales(sizes.slice() * sizes.halves),
        sum(std::max(sizes.all(), sizes.wide())) {}

  // Padding may hold any value, also NaN: the products read zeros there.
  void read(const Sizes& sizes, const T* tokens) {
    x = tokens + first * sizes.width;
    if (!mask || std::all_of(mask, mask + rows, [](uint8_t is_real) { return is_real; })) return;
    real.assign(sizes.slice() * sizes.width, T(0));
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
      for (int64_t from = sizes.length * part / sizes.parts; from < end; from += sizes.slice()) {
        slice.unit = unit, slice.sequence = sequence;
        slice.first = sequence * sizes.length + from, slice.rows = std::min(sizes.slice(), end - from);
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

struct FoldSizes {
  int64_t batch;       // B, or 1 where there are no rows
  int64_t heads, head; // h, p
  int64_t rank;        // s
  int64_t rows;        // M, at most those of the weights; 0: W is (h, p, s) as it is
  int64_t stored;      // rows of w_e and w_r of a head
  int64_t outputs;     // d where the output projection is folded, else 0
  int64_t threads;

  int64_t width() const { return heads * head; }
  int64_t scores() const { return head * rank; }                         // numbers of W_{e|X} of a head
  int64_t wide() const { return outputs ? outputs : head; }              // columns of a map
};

// G = [W_{e|X} C_e^T ; W_{r|X} C_r^T], times O^T where it is folded, and S = W Lambda W^T / h, of every sequence.
template <typename T>
struct Fold {
  Gemm<T> gemm;
  FoldSizes sizes;
  const T *w_e, *w_r, *rows, *concat, *out, *scale;  // (h, M, s) both, (B, M, d), (p, 2s), (d, d) or null, (h, s) or null

  const T* stored(int64_t a, int64_t half) const { return (half ? w_r : w_e) + a * sizes.stored * sizes.rank; }

  // `w` (B, h, 2, p, s): W_{e|X} and W_{r|X}; `heads` (B, h, 2, p, p): the maps before the output projection; `maps`
  // (B, h, 2, p, d) or null; `energy` (B, h, 2, p, p) or null.
  void forward(T* w, T* heads, T* maps, T* energy) const {
    const int64_t p = sizes.head, s = sizes.rank, d = sizes.width();
#pragma omp parallel for num_threads(int(sizes.threads)) collapse(2)
    for (int64_t i = 0; i < sizes.batch; ++i)
      for (int64_t a = 0; a < sizes.heads; ++a)
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t at = (i * sizes.heads + a) * 2 + half;
          T *own = w + at * p * s, *map = heads + at * p * p;
          if (sizes.rows)
            multiply<T>(gemm, p, s, sizes.rows, {rows + i * sizes.rows * d + a * p, d, true}, {stored(a, half), s}, 0,
                        own, s);
          else
            std::copy_n(stored(a, half), p * s, own);
          multiply<T>(gemm, p, p, s, {own, s}, {concat + half * s, 2 * s, true}, 0, map, p);
          if (maps) multiply<T>(gemm, p, d, p, {map, p}, {out + a * p, d, true}, 0, maps + at * p * d, d);
          if (energy) {
            std::vector<T> scaled = times_scale(own, a);
            multiply<T>(gemm, p, p, s, {scaled.data(), s}, {scaled.data(), s, true}, 0, energy + at * p * p, p);
            for (int64_t j = 0; j < p * p; ++j) energy[at * p * p + j] /= T(sizes.heads);
          }
        }
  }

  // The gradients, zero at first, from those of `maps` (of `heads` where `out` is null) and of `energy` (or null).
  // `grad_concat` has one sum for each head: (h, p, 2s).
  void backward(const T* w, const T* heads, const T* grad_maps, const T* grad_energy, T* grad_e, T* grad_r,
                T* grad_rows, T* grad_concat, T* grad_out, T* grad_scale) const {
    const int64_t p = sizes.head, s = sizes.rank, d = sizes.width();
#pragma omp parallel for num_threads(int(sizes.threads))
    for (int64_t a = 0; a < sizes.heads; ++a) {
      std::vector<T> of_map(p * p), of_w(p * s), both(p * p), of_scaled(p * s);
      for (int64_t i = 0; i < sizes.batch; ++i)
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t at = (i * sizes.heads + a) * 2 + half;
          const T *own = w + at * p * s, *grad_map = grad_maps + at * p * sizes.wide();
          if (out) {
            multiply<T>(gemm, d, p, p, {grad_map, d, true}, {heads + at * p * p, p}, 1, grad_out + a * p, d);
            multiply<T>(gemm, p, p, d, {grad_map, d}, {out + a * p, d}, 0, of_map.data(), p);
            grad_map = of_map.data();
          }
          multiply<T>(gemm, p, s, p, {grad_map, p, true}, {own, s}, 1, grad_concat + a * p * 2 * s + half * s, 2 * s);
          multiply<T>(gemm, p, s, p, {grad_map, p}, {concat + half * s, 2 * s}, 0, of_w.data(), s);
          if (grad_energy) {
            const T* given = grad_energy + at * p * p;
            for (int64_t j = 0; j < p; ++j)
              for (int64_t k = 0; k < p; ++k) both[j * p + k] = (given[j * p + k] + given[k * p + j]) / T(sizes.heads);
            const std::vector<T> scaled = times_scale(own, a);
            multiply<T>(gemm, p, s, p, {both.data(), p}, {scaled.data(), s}, 0, of_scaled.data(), s);
            for (int64_t j = 0; j < p * s; ++j) {
              of_w[j] += of_scaled[j] * scale[a * s + j % s];
              grad_scale[a * s + j % s] += of_scaled[j] * own[j];
            }
          }
          T* grad_stored = (half ? grad_r : grad_e) + a * sizes.stored * s;
          if (sizes.rows) {
            const T* read = rows + i * sizes.rows * d + a * p;
            multiply<T>(gemm, sizes.rows, s, p, {read, d}, {of_w.data(), s}, 1, grad_stored, s);
            multiply<T>(gemm, sizes.rows, p, s, {stored(a, half), s}, {of_w.data(), s, true}, 1,
                        grad_rows + i * sizes.rows * d + a * p, d);
          } else {
            add_rows(grad_stored, of_w.data(), 1, p * s);
          }
        }
    }
  }

  std::vector<T> times_scale(const T* own, int64_t a) const {
    std::vector<T> scaled(own, own + sizes.scores());
    for (int64_t j = 0; j < sizes.scores(); ++j) scaled[j] *= scale[a * sizes.rank + j % sizes.rank];
    return scaled;
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
  }                                                                                                                 \
  extern "C" void fold_##T(Gemm<T> gemm, const FoldSizes* sizes, const T* w_e, const T* w_r, const T* rows,          \
                           const T* concat, const T* out, const T* scale, T* w, T* heads, T* maps, T* energy) {      \
    Fold<T>{gemm, *sizes, w_e, w_r, rows, concat, out, scale}.forward(w, heads, maps, energy);                      \
  }                                                                                                                 \
  extern "C" void fold_back_##T(Gemm<T> gemm, const FoldSizes* sizes, const T* w_e, const T* w_r, const T* rows,     \
                                const T* concat, const T* out, const T* scale, const T* w, const T* heads,          \
                                const T* grad_maps, const T* grad_energy, T* grad_e, T* grad_r, T* grad_rows,       \
                                T* grad_concat, T* grad_out, T* grad_scale) {                                       \
    Fold<T>{gemm, *sizes, w_e, w_r, rows, concat, out, scale}.backward(w, heads, grad_maps, grad_energy, grad_e,    \
                                                                       grad_r, grad_rows, grad_concat, grad_out,    \
                                                                       grad_scale);                                 \
  }
KERNELS_OF(float)
KERNELS_OF(double)
