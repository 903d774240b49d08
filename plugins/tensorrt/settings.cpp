#include "tensorrt/settings.h"

#include <cstring>

#include "launch/images.h"
#include "tensorrt/report.h"

namespace kvg::tensorrt {
namespace {

// Reads a field by its name; refuses one of another type.
class FieldReader {
 public:
  FieldReader(const kvg_op& op, const trt::Fields* fields) : op_(op), fields_(fields) {}

  bool integer(const char* name, int64_t& value) const {
    const trt::Field* field = find(name);
    if (!field) return false;
    if (field->type == trt::FieldType::kInt64 && field->length == 1)
      std::memcpy(&value, field->data, sizeof value);
    else if (field->type == trt::FieldType::kInt32 && field->length == 1)
      value = read<int32_t>(*field);
    else
      refuse_type(*field, "one integer");
    return true;
  }

  bool real(const char* name, double& value) const {
    const trt::Field* field = find(name);
    if (!field) return false;
    if (field->type == trt::FieldType::kFloat64 && field->length == 1)
      value = read<double>(*field);
    else if (field->type == trt::FieldType::kFloat32 && field->length == 1)
      value = read<float>(*field);
    else
      refuse_type(*field, "one float");
    return true;
  }

  bool bytes(const char* name, std::string& value) const {
    const trt::Field* field = find(name);
    if (!field) return false;
    if (field->type != trt::FieldType::kChar && field->type != trt::FieldType::kUnknown &&
        field->type != trt::FieldType::kInt8)
      refuse_type(*field, "bytes");
    value.assign(static_cast<const char*>(field->data), static_cast<size_t>(field->length));
    return true;
  }

  [[noreturn]] void refuse_missing(const char* name) const {
    refuse(KVG_REFUSED, "%s: expected field %s, got none", op_.name, name);
  }

 private:
  const trt::Field* find(const char* name) const {
    for (int32_t i = 0; fields_ && i < fields_->count; ++i) {
      const trt::Field& field = fields_->fields[i];
      if (field.name && !std::strcmp(field.name, name) && (field.data || !field.length)) return &field;
    }
    return nullptr;
  }

  template <class T>
  static T read(const trt::Field& field) {
    T value;
    std::memcpy(&value, field.data, sizeof value);
    return value;
  }

  [[noreturn]] void refuse_type(const trt::Field& field, const char* expected) const {
    refuse(KVG_REFUSED, "%s: field %s: expected %s, got type %d with %d elements", op_.name,
           field.name, expected, static_cast<int>(field.type), field.length);
  }

  const kvg_op& op_;
  const trt::Fields* fields_;
};

void read_attributes(const FieldReader& reader, Settings& settings) {
  for (int i = 0; i < settings.op->num_attributes; ++i) {
    const kvg_attribute& spec = settings.op->attributes[i];
    kvg_value& value = settings.attributes[i];
    spec.is_float ? value.f = spec.value : value.i = static_cast<int64_t>(spec.value);
    const bool given = spec.is_float ? reader.real(spec.name, value.f) : reader.integer(spec.name, value.i);
    if (!given && spec.required) reader.refuse_missing(spec.name);
  }
}

int32_t own_integer(const FieldReader& reader, OwnField which, int64_t otherwise) {
  reader.integer(kOwnFields[which], otherwise);
  return static_cast<int32_t>(otherwise);
}

int32_t required_inputs(const kvg_op& op) {
  int32_t mask = 0;
  for (int i = 0; i < op.num_inputs; ++i) mask |= !op.operands[i].optional << i;
  return mask;
}

void list_operands(Settings& settings) {
  const kvg_op& op = *settings.op;
  const int32_t required = required_inputs(op);
  if ((settings.inputs & required) != required || settings.inputs >> op.num_inputs)
    refuse(KVG_REFUSED, "%s: field inputs: expected a bit for each of %d operands with all of %d set, "
           "got %d", op.name, op.num_inputs, required, settings.inputs);
  for (int i = 0; i < op.num_inputs; ++i)
    if (settings.inputs >> i & 1) settings.operands.push_back(i);
  settings.num_inputs = static_cast<int>(settings.operands.size());
  for (int i = op.num_inputs; i < op.num_inputs + op.num_outputs; ++i) {
    const int alias = op.operands[i].alias;
    if (alias < 0 || (settings.pool_out && (settings.inputs >> alias & 1)))
      settings.operands.push_back(i);
  }
}

}  // namespace

int Settings::position(int operand) const {
  for (size_t i = 0; i < operands.size(); ++i)
    if (operands[i] == operand) return static_cast<int>(i);
  return -1;
}

bool Settings::has(const char* input) const {
  for (int i = 0; i < num_inputs; ++i)
    if (!std::strcmp(operand(i).name, input)) return true;
  return false;
}

std::shared_ptr<const Settings> read_settings(const kvg_op& op, const trt::Fields* fields) {
  const FieldReader reader(op, fields);
  auto settings = std::make_shared<Settings>();
  settings->op = &op;
  read_attributes(reader, *settings);
  settings->inputs = own_integer(reader, kInputs, required_inputs(op));
  settings->aliased = own_integer(reader, kAliased, 1);
  settings->pool_out = own_integer(reader, kPoolOut, 1);
  list_operands(*settings);
  std::string kernels, images;
  if (!reader.bytes(kOwnFields[kKernelsField], kernels)) reader.refuse_missing("kernels");
  reader.bytes(kOwnFields[kImagesField], images);
  settings->kernels = launch::read_kernels(op, kernels, settings->has("k"));
  settings->kernels_record = std::make_shared<const std::string>(std::move(kernels));
  settings->images = std::make_shared<const std::string>(std::move(images));
  launch::check_attributes(*settings);
  for (int i = 0; i < settings->num_inputs; ++i)
    launch::check_taken(*settings, settings->operands[static_cast<size_t>(i)]);
  launch::publish(settings->images);
  return settings;
}

const trt::Fields* field_names(int op_index) {
  struct Names {
    std::vector<trt::Field> list[KVG_NUM_OPS];
    trt::Fields fields[KVG_NUM_OPS];
    Names() {
      for (int i = 0; i < KVG_NUM_OPS; ++i) {
        for (int a = 0; a < KVG_OPS[i]->num_attributes; ++a) {
          const kvg_attribute& spec = KVG_OPS[i]->attributes[a];
          list[i].push_back({spec.name, nullptr,
                             spec.is_float ? trt::FieldType::kFloat32 : trt::FieldType::kInt32, 1});
        }
        for (int own = 0; own < kNumOwnFields; ++own)
          list[i].push_back({kOwnFields[own], nullptr,
                             own < kKernelsField ? trt::FieldType::kInt32 : trt::FieldType::kChar, 1});
        fields[i] = {static_cast<int32_t>(list[i].size()), list[i].data()};
      }
    }
  };
  static const Names names;
  return &names.fields[op_index];
}

Serialized::Serialized(const Settings& settings) {
  const kvg_op& op = *settings.op;
  for (int i = 0; i < op.num_attributes; ++i) {
    const bool real = op.attributes[i].is_float;
    list_.push_back({op.attributes[i].name, &settings.attributes[i],
                     real ? trt::FieldType::kFloat64 : trt::FieldType::kInt64, 1});
  }
  list_.push_back({kOwnFields[kInputs], &settings.inputs, trt::FieldType::kInt32, 1});
  list_.push_back({kOwnFields[kAliased], &settings.aliased, trt::FieldType::kInt32, 1});
  list_.push_back({kOwnFields[kPoolOut], &settings.pool_out, trt::FieldType::kInt32, 1});
  const std::pair<OwnField, const std::string*> blobs[] = {
      {kKernelsField, settings.kernels_record.get()}, {kImagesField, settings.images.get()}};
  for (const auto& [which, bytes] : blobs)
    list_.push_back({kOwnFields[which], bytes->data(), trt::FieldType::kUnknown,
                     static_cast<int32_t>(bytes->size())});
  fields_ = {static_cast<int32_t>(list_.size()), list_.data()};
}

}  // namespace kvg::tensorrt
