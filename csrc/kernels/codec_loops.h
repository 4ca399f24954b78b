// The loops of codec_cpu.cpp. Each works on a strip: up to kStrip elements as floats, which stay in
// the first-level cache from one loop to the next.
#pragma once

#include <cstring>

#include "codec_element.h"
#include "simd.h"

namespace fastsync::kernels {

constexpr int kStrip = 1024;  // a multiple of every format's block

// x[i] = tensor[i] * scale + residual[i]
template <class T, bool kResidual>
struct Load {
  FS_HOST_DEVICE static void run(float* x, const T* tensor, const float* residual, int numel,
                                 float scale) {
    FS_INDEPENDENT
    for (int i = 0; i < numel; ++i) {
      const float product = widen(tensor[i]) * scale;
      x[i] = kResidual ? product + residual[i] : product;
    }
  }
};

// tensor[i] = x[i]
template <class T>
struct Store {
  FS_HOST_DEVICE static void run(T* tensor, const float* x, int numel) {
    FS_INDEPENDENT
    for (int i = 0; i < numel; ++i) tensor[i] = narrow<T>(x[i]);
  }
};

// residual[i] = lost[i] plus the old one when kAdd, where that is finite.
template <bool kAdd>
struct Keep {
  FS_HOST_DEVICE static void run(float* residual, const float* lost, int numel) {
    FS_INDEPENDENT
    for (int i = 0; i < numel; ++i) residual[i] = residual_of<kAdd>(residual[i], lost[i]);
  }
};

template <int kBlock>
FS_HOST_DEVICE uint32_t largest_magnitude(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const auto magnitude = static_cast<int32_t>(magnitude_of(x[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

// Two codes to a byte, by way of a byte for each; pairs vectorise without shuffles. A whole strip
// at a time, because a load that follows narrower stores to the same place waits for them.
FS_HOST_DEVICE void join_nibbles(uint8_t* bytes, const uint8_t* nibbles, int numel) {
  FS_INDEPENDENT
  for (int i = 0; i < numel / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, nibbles + 2 * i, sizeof pair);
    bytes[i] = static_cast<uint8_t>((pair & 0x0f) | ((pair >> 4) & 0xf0));
  }
}

FS_HOST_DEVICE void split_nibbles(uint8_t* nibbles, const uint8_t* bytes, int numel) {
  FS_INDEPENDENT
  for (int i = 0; i < numel / 2; ++i) {
    const auto pair = static_cast<uint16_t>((bytes[i] | bytes[i] << 4) & 0x0f0f);
    std::memcpy(nibbles + 2 * i, &pair, sizeof pair);
  }
}

struct RandomSource {
  RandomKey key;
  uint32_t first;  // index of the strip's first element
};

// Codes of `numel` elements, and in x what they lost: NaN where an element is not finite.
template <class Codec, bool kStochastic, bool kLost>
FS_HOST_DEVICE void code_run(float* x, typename Codec::Code* codes, int numel, float inverse,
                             float factor, RandomSource random) {
  FS_INDEPENDENT
  for (int i = 0; i < numel; ++i) {
    const float y = Codec::kScaled ? x[i] * inverse : x[i];
    const Coded coded =
        code_element<Codec, kStochastic>(y, random.key, random.first + static_cast<uint32_t>(i));
    codes[i] = static_cast<typename Codec::Code>(coded.code);
    if (kLost) x[i] = lost_of<Codec>(x[i], coded, factor);
  }
}

template <class Codec, bool kStochastic, bool kLost>
struct CodeUnscaled {
  FS_HOST_DEVICE static void run(float* x, uint8_t* codes, uint8_t*, int numel,
                                 RandomSource random) {
    code_run<Codec, kStochastic, kLost>(x, reinterpret_cast<typename Codec::Code*>(codes), numel, 1,
                                        1, random);
  }
};

template <class Codec, bool kStochastic, bool kLost>
struct CodeScaled {
  using Code = typename Codec::Code;
  using Scale = typename Codec::Scale;

  FS_HOST_DEVICE static void run(float* x, uint8_t* codes, uint8_t* scales, int numel,
                                 RandomSource random) {
    if constexpr (Codec::kFormat == Format::kInt4) {
      uint8_t nibbles[kStrip];
      code_blocks(x, nibbles, scales, numel, random);
      join_nibbles(codes, nibbles, numel);
    } else {
      code_blocks(x, reinterpret_cast<Code*>(codes), scales, numel, random);
    }
  }

 private:
  FS_HOST_DEVICE static void code_blocks(float* x, Code* codes, uint8_t* scales, int numel,
                                         RandomSource random) {
    for (int begin = 0; begin < numel; begin += Codec::kBlock) {
      const Scale scale = code_block(x + begin, codes + begin, random);
      std::memcpy(scales, &scale, sizeof scale);
      scales += sizeof scale;
      random.first += Codec::kBlock;
    }
  }

  FS_HOST_DEVICE static Scale code_block(float* x, Code* codes, RandomSource random) {
    const uint32_t largest = largest_magnitude<Codec::kBlock>(x);
    if (largest >= kTooLarge) return make_non_finite(x, codes);
    const Scale scale = Codec::choose(largest);
    code_run<Codec, kStochastic, kLost>(x, codes, Codec::kBlock, Codec::inverse(scale),
                                        Codec::factor(scale), random);
    return scale;
  }

  FS_HOST_DEVICE static Scale make_non_finite(float* x, Code* codes) {
    for (int i = 0; i < Codec::kBlock; ++i) {
      codes[i] = 0;
      x[i] = quiet_nan();
    }
    return Codec::kNonFinite;
  }
};

// x[i] = value of code i, plus the old x[i] when kAdd.
template <class Codec, bool kAdd>
FS_HOST_DEVICE void sum_run(float* x, const typename Codec::Code* codes, int numel, float factor) {
  FS_INDEPENDENT
  for (int i = 0; i < numel; ++i) {
    const float value = decoded<Codec>(codes[i], factor);
    x[i] = kAdd ? x[i] + value : value;
  }
}

template <class Codec, bool kAdd>
struct SumUnscaled {
  FS_HOST_DEVICE static void run(float* x, const uint8_t* codes, const uint8_t*, int numel) {
    sum_run<Codec, kAdd>(x, reinterpret_cast<const typename Codec::Code*>(codes), numel, 1);
  }
};

template <class Codec, bool kAdd>
struct SumScaled {
  using Code = typename Codec::Code;

  FS_HOST_DEVICE static void run(float* x, const uint8_t* codes, const uint8_t* scales, int numel) {
    if constexpr (Codec::kFormat == Format::kInt4) {
      uint8_t nibbles[kStrip];
      split_nibbles(nibbles, codes, numel);
      sum_blocks(x, nibbles, scales, numel);
    } else {
      sum_blocks(x, reinterpret_cast<const Code*>(codes), scales, numel);
    }
  }

 private:
  FS_HOST_DEVICE static void sum_blocks(float* x, const Code* codes, const uint8_t* scales,
                                        int numel) {
    for (int begin = 0; begin < numel; begin += Codec::kBlock) {
      typename Codec::Scale scale;
      std::memcpy(&scale, scales, sizeof scale);
      sum_run<Codec, kAdd>(x + begin, codes + begin, Codec::kBlock, Codec::factor(scale));
      scales += sizeof scale;
    }
  }
};

}  // namespace fastsync::kernels
