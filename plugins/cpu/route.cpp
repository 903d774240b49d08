// Chooses the experts of each row, and their weights, from a router's logits. A row is computed in
// one order, whatever the threads and the other rows.
//
// Legend: M rows, E experts, A experts of a row, G groups of experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/packed.h"

namespace kvg {
namespace {

using ll = long long;

enum Scores { kSoftmax, kSigmoid, kSoftmaxOfChosen };

constexpr int64_t kMostExperts = 4096;  // a row's numbers are on the stack
constexpr int64_t kElementsOfWork = 16;  // cost of an expert's score, in copied elements, about

struct Route {
  const char* logits;   // M x experts, of `type`
  const float* bias;    // experts; nullptr: none
  int32_t* indices;     // M x active
  float* weights;       // M x active
  int64_t rows, experts, active, scores, groups, active_groups, group_best;
  const Dtype* type;
  bool normalize;
  float epsilon, least_total, scale;
};

// The numbers of one row, by expert; `best` by group.
struct Row {
  float score[kMostExperts], key[kMostExperts], best[kMostExperts];
  int32_t order[kMostExperts];
};

Route read(const Operands& in) {
  Route op = {};
  op.rows = in.dims[KVG_DIM_ROWS];
  op.experts = in.dims[KVG_DIM_NUM_EXPERTS];
  op.active = in.integer(KVG_ROUTE_ATTR_NUM_ACTIVE);
  op.scores = in.integer(KVG_ROUTE_ATTR_SCORES);
  op.groups = in.integer(KVG_ROUTE_ATTR_NUM_GROUPS);
  op.active_groups = in.integer(KVG_ROUTE_ATTR_ACTIVE_GROUPS);
  op.group_best = in.integer(KVG_ROUTE_ATTR_GROUP_BEST);
  if (op.experts > kMostExperts)
    refuse("route: logits: dim num_experts: expected at most %lld, got %lld", ll{kMostExperts},
           ll{op.experts});
  if (op.active < 1 || op.active > op.experts)
    refuse("route: num_active: expected 1 to the %lld experts of logits, got %lld", ll{op.experts},
           ll{op.active});
  if (op.scores < kSoftmax || op.scores > kSoftmaxOfChosen)
    refuse("route: scores: expected 0, 1 or 2, got %lld", ll{op.scores});
  const int64_t normalize = in.integer(KVG_ROUTE_ATTR_NORMALIZE);
  if (normalize != 0 && normalize != 1)
    refuse("route: normalize: expected 0 or 1, got %lld", ll{normalize});
  op.normalize = normalize == 1;
  op.epsilon = in.at_least_0(KVG_ROUTE_ATTR_EPSILON);
  op.least_total = in.at_least_0(KVG_ROUTE_ATTR_LEAST_TOTAL);
  op.scale = in.finite(KVG_ROUTE_ATTR_SCALE);
  if (op.groups < 1 || op.experts % op.groups)
    refuse("route: num_groups: expected groups that divide the %lld experts of logits, got %lld",
           ll{op.experts}, ll{op.groups});
  const int64_t size = op.experts / op.groups;
  if (op.active_groups < 1 || op.active_groups > op.groups)
    refuse("route: active_groups: expected 1 to num_groups %lld, got %lld", ll{op.groups},
           ll{op.active_groups});
  if (op.group_best < 1 || op.group_best > size)
    refuse("route: group_best: expected 1 to the %lld experts of a group, got %lld", ll{size},
           ll{op.group_best});
  if (op.active > size * op.active_groups)
    refuse("route: num_active: expected at most the %lld experts of active groups, got %lld",
           ll{size * op.active_groups}, ll{op.active});
  op.logits = in.data<const char>(KVG_ROUTE_LOGITS);
  op.type = &dtype(in.dtype(KVG_ROUTE_LOGITS));
  op.bias = in.data<const float>(KVG_ROUTE_BIAS);
  op.indices = in.data<int32_t>(KVG_ROUTE_INDICES);
  op.weights = in.data<float>(KVG_ROUTE_WEIGHTS);
  if (in.dims[KVG_DIM_NUM_ACTIVE] != op.active)
    refuse("route: indices: dim num_active: expected %lld, got %lld", ll{op.active},
           ll{in.dims[KVG_DIM_NUM_ACTIVE]});
  return op;
}

void softmax(float* x, int64_t count) {
  float top = -kInfinity, sum = 0;
  for (int64_t i = 0; i < count; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
}

float sigmoid(float x) {
  const float smaller = std::exp(-std::fabs(x));
  return (x < 0 ? smaller : 1.0f) / (1.0f + smaller);
}

// A NaN becomes -infinity, because keys must have an order.
float number(float x) { return std::isnan(x) ? -kInfinity : x; }

// Sets the first `count` of `order` to the indices of the largest keys, the largest first; of equal
// keys, the lowest index first.
void find_best(const float* key, int64_t places, int64_t count, int32_t* order) {
  std::iota(order, order + places, 0);
  std::partial_sort(order, order + count, order + places, [key](int32_t a, int32_t b) {
    return key[a] > key[b] || (key[a] == key[b] && a < b);
  });
}

// Sets the keys of experts outside a row's best groups to -infinity.
void leave_groups(const Route& op, Row& row) {
  const int64_t size = op.experts / op.groups;
  for (int64_t g = 0; g < op.groups; ++g) {
    const float* key = row.key + g * size;
    find_best(key, size, op.group_best, row.order);
    float sum = 0;
    for (int64_t i = 0; i < op.group_best; ++i) sum += key[row.order[i]];
    row.best[g] = number(sum);
  }
  find_best(row.best, op.groups, op.active_groups, row.order);
  for (int64_t i = op.active_groups; i < op.groups; ++i)
    std::fill_n(row.key + row.order[i] * size, size, -kInfinity);
}

// Turns logits into scores.
void score(const Route& op, float* x) {
  if (op.scores == kSoftmax) softmax(x, op.experts);
  if (op.scores == kSigmoid) std::transform(x, x + op.experts, x, sigmoid);
}

void weigh(const Route& op, float* weight) {
  if (op.scores == kSoftmaxOfChosen) softmax(weight, op.active);
  float total = 1;
  if (op.normalize) {
    total = std::accumulate(weight, weight + op.active, 0.0f) + op.epsilon;
    total = total < op.least_total ? op.least_total : total;  // NaN stays NaN
  }
  for (int64_t a = 0; a < op.active; ++a) weight[a] = weight[a] / total * op.scale;
}

void route(const Route& op, int64_t m) {
  Row row;
  const size_t size = op.type->size * static_cast<size_t>(op.experts);
  op.type->to_float(op.logits + static_cast<size_t>(m) * size, row.score,
                    static_cast<size_t>(op.experts));
  score(op, row.score);
  for (int64_t e = 0; e < op.experts; ++e)
    row.key[e] = number(row.score[e] + (op.bias ? op.bias[e] : 0.0f));
  if (op.groups > 1) leave_groups(op, row);
  find_best(row.key, op.experts, op.active, row.order);
  int32_t* index = op.indices + m * op.active;
  float* weight = op.weights + m * op.active;
  for (int64_t a = 0; a < op.active; ++a) {
    index[a] = row.order[a];
    weight[a] = row.score[row.order[a]];
  }
  weigh(op, weight);
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_route(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_ROUTE, call);
    const Route op = read(in);
    for_rows(*call, op.rows, op.experts * kElementsOfWork, [&](int64_t m) { route(op, m); });
  });
}
