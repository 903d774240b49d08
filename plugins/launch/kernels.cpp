#include "launch/kernels.h"

#include <cstring>
#include <locale>
#include <sstream>

#include "cuda/refuse.h"

namespace kvg::launch {
namespace {

using cuda::refuse;

[[noreturn]] void refuse_line(const std::string& line, const char* expected) {
  refuse(KVG_REFUSED, "field kernels: expected %s, got \"%.100s\"", expected, line.c_str());
}

template <size_t N>
int position(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i)
    if (name == names[i]) return static_cast<int>(i);
  return -1;
}

int operand_index(const kvg_op& op, const std::string& name) {
  for (int i = 0; i < op.num_inputs + op.num_outputs; ++i)
    if (name == op.operands[i].name) return i;
  return -1;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool parse_digest(const std::string& text, cuda::Digest& digest) {
  if (text.size() != 2 * digest.size()) return false;
  for (size_t i = 0; i < digest.size(); ++i) {
    const int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    digest[i] = static_cast<uint8_t>(16 * high + low);
  }
  return true;
}

class Reader {
 public:
  explicit Reader(const kvg_op& op) : op_(op) {}

  void entry(const std::string& line) {
    std::istringstream words(line);
    words.imbue(std::locale::classic());  // whatever the process's is
    std::string kind;
    words >> kind;
    if (kind == "type") return type(line, words);
    if (kind == "dim") return named(line, words, made.dims);
    if (kind == "attribute") return named(line, words, made.attributes);
    if (kind == "arch") return arch(line, words);
    if (kind == "kernel") return kernel(line, words);
    refuse_line(line, "type, dim, attribute, arch or kernel");
  }

  Kernels made;

 private:
  void type(const std::string& line, std::istringstream& words) {
    std::string variable, dtype;
    words >> variable >> dtype;
    const int code = position(KVG_DTYPE_NAMES, dtype);
    if ((variable != "T" && variable != "P") || code < 1) refuse_line(line, "type T or P and a dtype");
    made.dtypes[variable == "T" ? 1 : 2] = code;
  }

  template <class Number>
  void named(const std::string& line, std::istringstream& words,
             std::map<std::string, Number, std::less<>>& to) {
    std::string name;
    Number value{};
    if (!(words >> name >> value)) refuse_line(line, "a name and a number");
    to[name] = value;
  }

  void arch(const std::string& line, std::istringstream& words) {
    ArchKernels found;
    std::string name;
    Tiling& t = found.tiling;
    if (!(words >> name >> t.multiprocessors >> t.store_tokens >> t.prefill_tokens >>
          t.decode_tokens >> t.min_part >> t.max_parts) ||
        t.multiprocessors < 1 || t.store_tokens < 1 || t.prefill_tokens < 1 ||
        t.decode_tokens < 1 || t.min_part < 1 || t.max_parts < 1)
      refuse_line(line, "an arch with 6 numbers of at least 1");
    found.arch = cuda::parse_arch(name.c_str());
    made.archs.push_back(found);
  }

  void kernel(const std::string& line, std::istringstream& words) {
    std::string role_name, digest, word;
    Kernel found;
    words >> role_name >> found.function >> found.num_warps >> found.shared_bytes >> digest;
    const int role = position(kRoleNames, role_name);
    if (!words || role < 0 || made.archs.empty() || !parse_digest(digest, found.digest))
      refuse_line(line, "a kernel of an arch: role, function, warps, shared bytes, SHA-256");
    bool foreign = false;
    while (words >> word) foreign |= !parameter(line, word, found);
    if (!foreign) made.archs.back().kernels[role] = found;
  }

  // False for a pointer to what this op has no operand for.
  bool parameter(const std::string& line, const std::string& word, Kernel& kernel) {
    const size_t star = word.find('*');
    const std::string name = word.substr(0, star);
    if (star == std::string::npos) {
      const int value = position(kValueNames, name);
      if (value < 0) refuse_line(line, "values that a plan has");
      kernel.parameters.push_back({Parameter::kValue, value, 0});
      return true;
    }
    const auto alignment = static_cast<uint32_t>(std::strtoul(word.c_str() + star + 1, nullptr, 10));
    if (alignment < 1) refuse_line(line, "an alignment of at least 1 of every pointer");
    const int scratch = position(kScratchNames, name);
    const int operand = operand_index(op_, name);
    if (scratch >= 0)
      kernel.parameters.push_back({Parameter::kScratch, scratch, alignment});
    else if (operand >= 0)
      kernel.parameters.push_back({Parameter::kOperand, operand, alignment});
    return scratch >= 0 || operand >= 0;
  }

  const kvg_op& op_;
};

int64_t dim_of(const Kernels& kernels, const char* name) {
  const auto found = kernels.dims.find(name);
  if (found == kernels.dims.end() || found->second < 1)
    refuse(KVG_REFUSED, "field kernels: expected dim %s, got none", name);
  return found->second;
}

void complete(const kvg_op& op, Kernels& kernels, bool stores) {
  const bool attends = operand_index(op, "out") >= 0;
  if (!kernels.dtypes[1] || !kernels.dtypes[2])
    refuse(KVG_REFUSED, "field kernels: expected types T and P, got %s",
           kernels.dtypes[1] || kernels.dtypes[2] ? "one of them" : "neither");
  if (kernels.archs.empty())
    refuse(KVG_REFUSED, "field kernels: expected kernels of at least one arch, got none");
  for (ArchKernels& arch : kernels.archs) {
    arch.tiling.kv_heads = dim_of(kernels, "num_kv_heads");
    arch.tiling.v_width = dim_of(kernels, "v_head_dim");
    arch.tiling.heads = attends ? dim_of(kernels, "num_heads") : 0;
    const auto window = kernels.attributes.find("window");
    arch.tiling.window = window == kernels.attributes.end() ? 0 : static_cast<int64_t>(window->second);
    for (int role = 0; role < kNumRoles; ++role)
      if ((role == kStore ? stores : attends) && !arch.kernels[role].given())
        refuse(KVG_REFUSED, "field kernels: %s: expected a %s kernel for %s, got none",
               arch.arch.name.c_str(), kRoleNames[role], op.name);
  }
}

}  // namespace

int32_t Kernels::dtype_of(const kvg_operand& operand) const {
  if (operand.type_variable) return dtypes[operand.type_variable];
  int32_t code = 1;
  while (!(operand.dtypes >> code & 1u)) ++code;
  return code;
}

const ArchKernels& Kernels::on(int major, int minor) const {
  const ArchKernels* best = nullptr;
  std::string known;
  for (const ArchKernels& candidate : archs) {
    known += (known.empty() ? "" : ", ") + candidate.arch.name;
    if (candidate.arch.runs_on(major, minor) &&
        (!best || best->arch.number() < candidate.arch.number()))
      best = &candidate;
  }
  if (!best)
    refuse(KVG_DEVICE, "device: expected one that runs the graph's kernels (%s), got compute "
           "capability %d.%d", known.c_str(), major, minor);
  return *best;
}

Kernels parse_kernels(const kvg_op& op, const std::string& text, bool stores) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  if (line != "kvgraph-kernels 1") refuse_line(line, "\"kvgraph-kernels 1\" from this kvgraph");
  Reader reader(op);
  while (std::getline(lines, line))
    if (!line.empty()) reader.entry(line);
  complete(op, reader.made, stores);
  return reader.made;
}

}  // namespace kvg::launch
