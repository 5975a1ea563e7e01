#include <pacer/checkpoints/detail/quant_state.h>

#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/json_lines.h>
#include <pacer/files/json_scanner.h>
#include <pacer/kernels/math/nf4.h>

namespace pacer::detail {
namespace {

constexpr std::pair<const char*, at::ScalarType> kQuantDtypes[] = {
    {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};

at::ScalarType quant_dtype(std::string_view name, const std::string& what) {
  for (const auto& [known, dtype] : kQuantDtypes) {
    if (name == known) return dtype;
  }
  throw InvalidArgument(concatenate(what, " is of the dtype ", quote_for_message(name),
                                    "; pacer knows float32, bfloat16 and float16"));
}

// The fields of the text, as far as they are there.
struct QuantFields {
  std::optional<std::string> quant_type, dtype, nested_dtype;
  std::optional<int64_t> blocksize, nested_blocksize;
  std::optional<std::vector<int64_t>> shape;
  std::optional<double> nested_offset;
};

std::vector<int64_t> quant_shape(JsonScanner& scanner) {
  constexpr size_t kMost = 8;
  std::vector<int64_t> shape;
  scanner.expect('[');
  if (scanner.take(']')) return shape;
  do {
    if (shape.size() == kMost) scanner.fail_at(scanner.position(), "a shape of more than 8 dimensions");
    shape.push_back(scanner.integer());
  } while (scanner.more(']'));
  return shape;
}

QuantFields quant_fields(std::string& text, const std::string& what) {
  JsonScanner scanner(text.data(), text.size(), 0, what);
  QuantFields fields;
  const auto first = [&](const auto& field, std::string_view name, size_t at) {
    if (field) scanner.fail_at(at, "the field ", quote_for_message(name), " occurs twice");
  };
  const auto take_text = [&](std::optional<std::string>& field, std::string_view name, size_t at) {
    first(field, name, at);
    field = std::string(scanner.string());
  };
  const auto take_integer = [&](std::optional<int64_t>& field, std::string_view name, size_t at) {
    first(field, name, at);
    field = scanner.integer();
  };
  scanner.expect('{');
  if (!scanner.take('}')) {
    do {
      const size_t at = scanner.position();
      const std::string_view name = scanner.string();
      scanner.expect(':');
      if (name == "quant_type") {
        take_text(fields.quant_type, name, at);
      } else if (name == "dtype") {
        take_text(fields.dtype, name, at);
      } else if (name == "nested_dtype") {
        take_text(fields.nested_dtype, name, at);
      } else if (name == "blocksize") {
        take_integer(fields.blocksize, name, at);
      } else if (name == "nested_blocksize") {
        take_integer(fields.nested_blocksize, name, at);
      } else if (name == "shape") {
        first(fields.shape, name, at);
        fields.shape = quant_shape(scanner);
      } else if (name == "nested_offset") {
        first(fields.nested_offset, name, at);
        fields.nested_offset = scanner.number();
      } else {
        scanner.fail_at(at, "the field ", quote_for_message(name), " is not known");
      }
    } while (scanner.more('}'));
  }
  scanner.expect_end();
  return fields;
}

}  // namespace

std::string quant_state_text(const QuantState& state, const std::string& layer) {
  const char* dtype = nullptr;
  for (const auto& [name, known] : kQuantDtypes) {
    if (known == state.dtype) dtype = name;
  }
  require(dtype != nullptr, "the weight of ", layer, " in 4 bits stands for one of ", state.dtype,
          ", which bitsandbytes does not decode to; convert the model to Float, BFloat16 or Half first");
  JsonWriter shape;
  shape.list(JsonLayout::spaced);
  for (const int64_t size : state.shape) shape.value(size);
  JsonLine line;
  line.add("quant_type", "nf4").add("blocksize", kernels::kNf4Block).add("dtype", dtype);
  JsonLine nested;
  if (state.nested) {
    nested.add("nested_blocksize", kernels::kNf4NestedBlock)
        .add("nested_dtype", "float32")
        .add("nested_offset", static_cast<double>(state.offset));
  }
  std::string text = line.str();
  text.pop_back();
  text += ", \"shape\": " + shape.end().text();
  return state.nested ? text + ", " + nested.str().substr(1) : text + "}";
}

QuantState parse_quant_state(std::string text, const std::string& what) {
  const QuantFields fields = quant_fields(text, what);
  require<FileError>(fields.quant_type && fields.blocksize && fields.dtype && fields.shape, what,
                     " lacks its quant_type, blocksize, dtype or shape");
  require(*fields.quant_type == "nf4", what, " has the quant_type ", quote_for_message(*fields.quant_type),
          "; pacer knows nf4 alone");
  require(*fields.blocksize == kernels::kNf4Block, what, " has blocks of ", *fields.blocksize,
          " elements; pacer knows blocks of ", kernels::kNf4Block, " alone");
  QuantState state;
  state.dtype = quant_dtype(*fields.dtype, what);
  state.shape = *fields.shape;
  state.nested = fields.nested_blocksize || fields.nested_dtype || fields.nested_offset;
  if (!state.nested) return state;
  require<FileError>(fields.nested_blocksize && fields.nested_dtype && fields.nested_offset, what,
                     " lacks one of nested_blocksize, nested_dtype and nested_offset");
  require(*fields.nested_blocksize == kernels::kNf4NestedBlock, what, " has blocks of ",
          *fields.nested_blocksize, " scales; pacer knows blocks of ", kernels::kNf4NestedBlock, " alone");
  require(*fields.nested_dtype == "float32", what, " has scales of the dtype ",
          quote_for_message(*fields.nested_dtype), "; pacer knows float32 alone");
  state.offset = static_cast<float>(*fields.nested_offset);
  require(std::isfinite(state.offset), what, " has the nested_offset ", *fields.nested_offset,
          ", which is beyond 32-bit floats");
  return state;
}

}  // namespace pacer::detail
