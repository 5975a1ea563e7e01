// The CPU side of norms and rotations of heads.
#include <pacer/kernels/rotary.h>

#include <algorithm>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/kernels/cpu/sum_parts.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

// The channels of a head, in two halves.
struct Halves {
  float first[kRotaryMostChannels / 2], second[kRotaryMostChannels / 2];
};

template <class Element>
PACER_TARGET_CLONES void load_halves(const Element* head, int64_t half, Halves& x) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    x.first[i] = load(head[i]);
    x.second[i] = load(head[i + half]);
  }
}

template <class Element>
PACER_TARGET_CLONES void store_halves(const Halves& x, int64_t half, Element* head) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    store(x.first[i], head[i]);
    store(x.second[i], head[i + half]);
  }
}

PACER_TARGET_CLONES void rotate_halves(const float* cosines, const float* sines, float sign, int64_t half,
                                       Halves& x) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const RotatedPair pair = rotated(x.first[i], x.second[i], cosines[i], mul_(sign, sines[i]));
    x.first[i] = pair.first;
    x.second[i] = pair.second;
  }
}

PACER_TARGET_CLONES void multiply_halves(const Halves& x, const Halves& y, int64_t half, Halves& products) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    products.first[i] = mul_(x.first[i], y.first[i]);
    products.second[i] = mul_(x.second[i], y.second[i]);
  }
}

// The sum of products over a head.
PACER_TARGET_CLONES float sum_of_products(const Halves& x, const Halves& y, int64_t half) {
  float accumulators[kRotaryMostChannels / 2] = {}, lanes[kRotaryMostChannels / 16] = {};
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    accumulators[i] = fma_(x.second[i], y.second[i], mul_(x.first[i], y.first[i]));
  }
  const int64_t count = rotary_lanes(2 * half);
  for (int64_t lane = 0; lane < count; ++lane) {
    float eight[kLayerNormPiece];
    std::copy_n(accumulators + lane * kLayerNormPiece, kLayerNormPiece, eight);
    lanes[lane] = sum_of_eight(eight);
  }
  return fold(lanes, count);
}

PACER_TARGET_CLONES void scale_halves(float factor, int64_t half, Halves& x) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    x.first[i] = mul_(x.first[i], factor);
    x.second[i] = mul_(x.second[i], factor);
  }
}

// Turns what was read into what is normalised, and returns the factor.
float normalize_halves(float epsilon, int64_t half, Halves& x) {
  const float rstd = rstd_of(sum_of_products(x, x, half), static_cast<float>(2 * half), epsilon);
  scale_halves(rstd, half, x);
  return rstd;
}

template <class Element>
const Element* head_of(const void* memory, int64_t row, int64_t stride, int64_t first) {
  return static_cast<const Element*>(memory) + row * stride + first;
}
template <class Element>
Element* head_of(void* memory, int64_t row, int64_t stride, int64_t first) {
  return static_cast<Element*>(memory) + row * stride + first;
}

// Turns a head by the angles of its row, or back.
void rotate(const RotaryForward& work, int64_t row, float sign, Halves& x) {
  if (work.cosines == nullptr) return;
  const int64_t half = work.head_dim / 2, first = row % work.sequence * half;
  rotate_halves(work.cosines + first, work.sines + first, sign, half, x);
}

template <class Element, class Parameter>
void forward_rows(const RotaryForward& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  const int64_t half = work.head_dim / 2;
  Halves x, weight;
  for (const RotaryHeads* kind : {&work.q, &work.k}) {
    if (kind->weight != nullptr) load_halves(static_cast<const Parameter*>(kind->weight), half, weight);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < kind->heads; ++head) {
        const int64_t first = head * work.head_dim;
        load_halves(head_of<Element>(kind->from, row, kind->from_stride, first), half, x);
        if (kind->weight != nullptr) {
          normalize_halves(work.epsilon, half, x);
          multiply_halves(x, weight, half, x);
        }
        rotate(work, row, 1.0f, x);
        store_halves(x, half, head_of<Element>(kind->to, row, kind->to_stride, first));
      }
    }
  }
}

PACER_TARGET_CLONES void add_weight_gradient(const Halves& gradient, const Halves& normalized, int64_t half,
                                             float* sums) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    sums[i] = fma_(gradient.first[i], normalized.first[i], sums[i]);
    sums[i + half] = fma_(gradient.second[i], normalized.second[i], sums[i + half]);
  }
}

// From the gradient of n * weight, which becomes that of x.
PACER_TARGET_CLONES void write_norm_gradient(const Halves& normalized, float rstd, float mean_product,
                                             int64_t half, Halves& gradient) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    gradient.first[i] =
        layer_norm_gradient(gradient.first[i], normalized.first[i], rstd, 0.0f, mean_product, 0.0f);
    gradient.second[i] =
        layer_norm_gradient(gradient.second[i], normalized.second[i], rstd, 0.0f, mean_product, 0.0f);
  }
}

// What one kind of heads reads and adds up in backward.
struct Read {
  const RotaryHeads* kind;
  const void* read;
  int64_t stride;
  float* partials;  // (parts, head_dim); null: no sums
};

// Slots that get anything from so many heads, and more up to a power of two: the others stay 0, and folding them
// changes nothing.
int64_t used_slots(const RotaryBackward& work, int64_t heads) {
  const int64_t all = rotary_slots(work.head_dim);
  int64_t used = 1;
  while (used < all && used < heads) used *= 2;
  return used;
}

template <class Element, class Parameter>
void backward_part(const RotaryBackward& work, const Read& of, int64_t part) {
  const RotaryHeads& kind = *of.kind;
  const int64_t half = work.head_dim / 2, part_rows = rotary_part_rows(work.rows), begin = part * part_rows,
                end = std::min(work.rows, begin + part_rows),
                slots = used_slots(work, (end - begin) * kind.heads);
  const bool is_normalized = kind.weight != nullptr;
  std::vector<float> sums(is_normalized ? static_cast<size_t>(slots * work.head_dim) : 0);
  Halves gradient, x, weight;
  if (is_normalized) load_halves(static_cast<const Parameter*>(kind.weight), half, weight);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < kind.heads; ++head) {
      const int64_t first = head * work.head_dim;
      load_halves(head_of<Element>(kind.from, row, kind.from_stride, first), half, gradient);
      rotate(work, row, -1.0f, gradient);
      if (is_normalized) {
        load_halves(head_of<Element>(of.read, row, of.stride, first), half, x);
        const float rstd = normalize_halves(work.epsilon, half, x);
        const int64_t slot = ((row - begin) * kind.heads + head) % slots;
        add_weight_gradient(gradient, x, half, sums.data() + slot * work.head_dim);
        multiply_halves(gradient, weight, half, gradient);
        const float mean_product =
            div_(sum_of_products(gradient, x, half), static_cast<float>(work.head_dim));
        write_norm_gradient(x, rstd, mean_product, half, gradient);
      }
      store_halves(gradient, half, head_of<Element>(kind.to, row, kind.to_stride, first));
    }
  }
  if (!is_normalized || of.partials == nullptr) return;
  for (int64_t channel = 0; channel < work.head_dim; ++channel) {
    float of_slots[kRotaryThreads] = {};
    for (int64_t slot = 0; slot < slots; ++slot) {
      of_slots[slot] = sums[static_cast<size_t>(slot * work.head_dim + channel)];
    }
    of.partials[part * work.head_dim + channel] = fold(of_slots, slots);
  }
}

template <class Element>
void copy_rows(const RotaryHeads& heads, int64_t head_dim, int64_t begin, int64_t end) {
  if (heads.heads == 0) return;
  for (int64_t row = begin; row < end; ++row) {
    std::copy_n(head_of<Element>(heads.from, row, heads.from_stride, 0), heads.heads * head_dim,
                head_of<Element>(heads.to, row, heads.to_stride, 0));
  }
}

// Calls visit(element, parameter) with an element of each type.
template <class Visit>
void with_rotary_types(const RotaryForward& work, const Visit& visit) {
  with_layer_norm_types(work.type, work.type, work.parameter_type,
                        [&](auto, auto element, auto parameter) { visit(element, parameter); });
}

void check_heads(const RotaryHeads& heads, const char* name, const RotaryForward& work) {
  const bool has_elements = heads.heads != 0 && work.rows != 0;
  require(heads.heads >= 0 && (!has_elements || (heads.from != nullptr && heads.to != nullptr)),
          "the rotation of heads needs memory for its ", name, "; pass it, or 0 heads");
  const int64_t width = heads.heads * work.head_dim;
  require(heads.from_stride >= width && heads.to_stride >= width, "the rotation of heads has ", name, " of ",
          width, " elements a row, whose strides ", heads.from_stride, " and ", heads.to_stride,
          " are too small; pass those of their matrices");
}

}  // namespace

void check_rotary(const RotaryForward& work) {
  require(work.head_dim > 0 && work.head_dim % 2 == 0 && work.head_dim <= kRotaryMostChannels,
          "the rotation of heads needs an even number of channels, at most ", kRotaryMostChannels, ", not ",
          work.head_dim);
  require(work.rows >= 0 && work.sequence > 0, "the rotation of heads takes 0 rows or more, of sequences of ",
          "1 or more, not ", work.rows, " and ", work.sequence);
  require((work.cosines == nullptr) == (work.sines == nullptr),
          "the rotation of heads needs cosines and sines; pass both or none");
  check_heads(work.q, "queries", work);
  check_heads(work.k, "keys", work);
  with_rotary_types(work, [](auto, auto) {});
}

void check_rotary(const RotaryBackward& work) {
  check_rotary(static_cast<const RotaryForward&>(work));
  check_heads(work.v, "values", work);
  const auto has_read = [&](const RotaryHeads& heads, const void* read) {
    return heads.weight == nullptr || read != nullptr || work.rows == 0;
  };
  require(has_read(work.q, work.q_read) && has_read(work.k, work.k_read),
          "norms of heads need what they have normalised for backward; pass it");
  require(
      work.partials != nullptr || work.rows == 0 || (work.dq_weight == nullptr && work.dk_weight == nullptr),
      "gradients of the weights of heads' norms need memory for partial sums; pass it");
  require((work.dq_weight == nullptr || work.q.weight != nullptr) &&
              (work.dk_weight == nullptr || work.k.weight != nullptr),
          "heads without a norm have no gradient of its weight; pass null");
}

void rotary_cpu(const RotaryForward& work, int64_t begin, int64_t end) {
  check_rotary(work);
  with_rotary_types(work, [&](auto element, auto parameter) {
    forward_rows<decltype(element), decltype(parameter)>(work, begin, end);
  });
}

void rotary_backward_cpu(const RotaryBackward& work, int64_t begin, int64_t end) {
  check_rotary(work);
  const FullDenormals full_denormals;
  const int64_t parts = rotary_parts(work.rows), part_rows = rotary_part_rows(work.rows);
  const Read q{&work.q, work.q_read, work.q_read_stride, work.partials},
      k{&work.k, work.k_read, work.k_read_stride,
        work.partials == nullptr ? nullptr : work.partials + parts * work.head_dim};
  with_rotary_types(work, [&](auto element, auto parameter) {
    for (int64_t part = begin; part < end; ++part) {
      for (const Read* read : {&q, &k}) {
        backward_part<decltype(element), decltype(parameter)>(work, *read, part);
      }
      copy_rows<decltype(element)>(work.v, work.head_dim, part * part_rows,
                                   std::min(work.rows, (part + 1) * part_rows));
    }
  });
}

void rotary_weights_cpu(const RotaryBackward& work) {
  check_rotary(work);
  const FullDenormals full_denormals;
  const int64_t parts = rotary_parts(work.rows);
  const float* const of_k = work.partials + parts * work.head_dim;
  if (work.dq_weight != nullptr)
    sum_parts(work.partials, parts, work.head_dim, 0, work.head_dim, work.dq_weight);
  if (work.dk_weight != nullptr) sum_parts(of_k, parts, work.head_dim, 0, work.head_dim, work.dk_weight);
}

}  // namespace pacer::kernels
