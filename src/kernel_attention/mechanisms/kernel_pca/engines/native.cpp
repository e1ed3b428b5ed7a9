// kernel_attention.mechanisms.kernel_pca.engines.shrinkage for processors: what lies between two attentions, in one sweep each.
// `native_kernels.py` calls this. Recursion and letters as in `fused.py`.
//
// A tensor (B, h, N, p) may lie in any order but for its last axis, the p numbers of a row.

#include <cstdint>
#include <vector>

namespace {

struct Sizes {
  int64_t batch, heads, length, width;  // B, h, N, p
  int64_t threads;
};

template <typename T>
struct Rows {
  T* data;                     // null: the tensor is zero, or not wanted
  int64_t batch, head, token;  // from one to the next, in numbers

  T* at(int64_t b, int64_t h, int64_t i) const { return data ? data + b * batch + h * head + i * token : nullptr; }
  template <typename Row>
  Row* at(int64_t b, int64_t h, int64_t i, Row* otherwise) const {
    return data ? at(b, h, i) : otherwise;
  }
};

// Calls row(b, h, i) for every row; the threads share the tokens.
template <typename Row>
void for_rows(const Sizes& sizes, Row row) {
#pragma omp parallel for num_threads(int(sizes.threads)) collapse(2) schedule(static)
  for (int64_t b = 0; b < sizes.batch; ++b)
    for (int64_t i = 0; i < sizes.length; ++i)
      for (int64_t h = 0; h < sizes.heads; ++h) row(b, h, i);
}

// Where x is NaN, so is the result.
template <typename T>
T clip(T x, T bound) {
  x = x > bound ? bound : x;
  return x < -bound ? -bound : x;
}

// T_t and C_t from C_{t-1}, which may lie in the same memory, L_{t-1} and L_{t-2}.
template <typename T>
void clean(const Sizes& sizes, Rows<T> data, Rows<T> previous, Rows<T> low, Rows<T> before, Rows<T> threshold,
           Rows<T> keys, Rows<T> clipped) {
  const std::vector<T> zeros(sizes.width);
  for_rows(sizes, [&](int64_t b, int64_t h, int64_t i) {
    const T tau = *threshold.at(b, h, i), *k = data.at(b, h, i), *old = previous.at(b, h, i, zeros.data());
    const T *l = low.at(b, h, i, zeros.data()), *l_before = before.at(b, h, i, zeros.data());
    T *t = keys.at(b, h, i), *c = clipped.at(b, h, i);
#pragma omp simd
    for (int64_t j = 0; j < sizes.width; ++j) {
      const T offset = old[j] - 2 * l[j] + l_before[j], value = clip(k[j] + offset, tau);
      t[j] = value - 2 * offset - l[j];
      c[j] = value;
    }
  });
}

// T_t from E_{t-1} and L_{t-1}.
template <typename T>
void clean_again(const Sizes& sizes, Rows<T> data, Rows<T> offset, Rows<T> low, Rows<T> threshold, Rows<T> keys) {
  const std::vector<T> zeros(sizes.width);
  for_rows(sizes, [&](int64_t b, int64_t h, int64_t i) {
    const T tau = *threshold.at(b, h, i), *k = data.at(b, h, i);
    const T *e = offset.at(b, h, i, zeros.data()), *l = low.at(b, h, i, zeros.data());
    T* t = keys.at(b, h, i);
#pragma omp simd
    for (int64_t j = 0; j < sizes.width; ++j) t[j] = clip(k[j] + e[j], tau) - 2 * e[j] - l[j];
  });
}

// E_t from E_{t-1}, L_t and L_{t-1}.
template <typename T>
void following(const Sizes& sizes, Rows<T> data, Rows<T> offset, Rows<T> threshold, Rows<T> low, Rows<T> before,
               Rows<T> next) {
  const std::vector<T> zeros(sizes.width);
  for_rows(sizes, [&](int64_t b, int64_t h, int64_t i) {
    const T tau = *threshold.at(b, h, i), *k = data.at(b, h, i), *e = offset.at(b, h, i, zeros.data());
    const T *l = low.at(b, h, i), *l_before = before.at(b, h, i, zeros.data());
    T* to = next.at(b, h, i);
#pragma omp simd
    for (int64_t j = 0; j < sizes.width; ++j) to[j] = clip(k[j] + e[j], tau) - 2 * l[j] + l_before[j];
  });
}

// The gradients of a step from that by T_t, one + two, and that by E_t: by L_{t-1} and E_{t-1}, where wanted, by K,
// to which it is added, and by the threshold. What it writes may lie in the memory of what it reads.
template <typename T>
void pull_back(const Sizes& sizes, Rows<T> data, Rows<T> offset, Rows<T> threshold, Rows<T> part,
               Rows<T> other, Rows<T> by_offset, Rows<T> by_low, Rows<T> to_offset, Rows<T> by_data,
               Rows<T> by_threshold) {
  const std::vector<T> zeros(sizes.width);
  for_rows(sizes, [&](int64_t b, int64_t h, int64_t i) {
    const T tau = *threshold.at(b, h, i), *k = data.at(b, h, i), *e = offset.at(b, h, i, zeros.data());
    const T *one = part.at(b, h, i), *two = other.at(b, h, i, zeros.data());
    const T* later = by_offset.at(b, h, i, zeros.data());
    T *low = by_low.at(b, h, i), *before = to_offset.at(b, h, i), *sum = by_data.at(b, h, i), by_tau = 0;
#pragma omp simd reduction(+ : by_tau)
    for (int64_t j = 0; j < sizes.width; ++j) {
      const T residual = k[j] + e[j], cleaned = one[j] + two[j], of_clipped = cleaned + later[j];
      const T above = residual > tau ? of_clipped : 0, below = residual < -tau ? of_clipped : 0;
      const T of_residual = of_clipped - above - below;
      by_tau += above - below;
      sum[j] += of_residual;
      if (low) {
        low[j] = later[j] + 3 * cleaned - 2 * of_residual;
        before[j] = of_residual - 2 * cleaned;
      }
    }
    *by_threshold.at(b, h, i) = by_tau;
  });
}

}  // namespace

#define KERNELS_OF(T)                                                                                                \
  extern "C" void clean_##T(const Sizes* sizes, const Rows<T>* x) {                                                  \
    clean<T>(*sizes, x[0], x[1], x[2], x[3], x[4], x[5], x[6]);                                                      \
  }                                                                                                                  \
  extern "C" void clean_again_##T(const Sizes* sizes, const Rows<T>* x) {                                            \
    clean_again<T>(*sizes, x[0], x[1], x[2], x[3], x[4]);                                                            \
  }                                                                                                                  \
  extern "C" void following_##T(const Sizes* sizes, const Rows<T>* x) {                                              \
    following<T>(*sizes, x[0], x[1], x[2], x[3], x[4], x[5]);                                                        \
  }                                                                                                                  \
  extern "C" void pull_back_##T(const Sizes* sizes, const Rows<T>* x) {                                              \
    pull_back<T>(*sizes, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9]);                                \
  }
KERNELS_OF(float)
KERNELS_OF(double)
