// Callbacks of torch that report operators, their tensors and the caching allocator to the detector.
//
// Build it with NDEBUG, as torch is built, because the layout of at::RecordFunction depends on it.
#include "race.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <unordered_map>
#include <unordered_set>

namespace {

// Operators that access no element.
const std::unordered_set<std::string> accessing_nothing = {
    "aten::is_pinned",     "aten::empty_like",        "aten::new_empty",     "aten::resize_",
    "aten::set_",          "aten::record_stream",     "aten::detach",        "aten::is_same_size",
    "aten::result_type",   "aten::new_empty_strided", "aten::pin_memory",    "aten::_has_compatible_shallow_copy_type",
    "aten::size",          "aten::stride",            "aten::_pin_memory",   "aten::is_nonzero",
    "aten::storage_offset", "aten::resize_as_"};

struct Plan {
    bool is_ignored = false;
    std::vector<Access> arguments;
    std::vector<bool> is_new_result;
};

// Return how an operator uses its arguments, according to its schema.
const Plan &plan_of(const at::RecordFunction &call) {
    static thread_local std::unordered_map<std::string, Plan> plans;
    auto schema = call.operator_schema();
    std::string key = std::string(call.name()) + "." + schema->overload_name();
    auto [entry, is_new] = plans.try_emplace(key);
    Plan &plan = entry->second;
    if (!is_new) return plan;
    plan.is_ignored = accessing_nothing.count(call.name());
    for (auto &result : schema->returns()) {
        auto *alias = result.alias_info();
        plan.is_ignored |= alias && !alias->isWrite(); // a view; operators inside it access elements
        plan.is_new_result.push_back(!alias);
    }
    for (auto &argument : schema->arguments()) {
        auto *alias = argument.alias_info();
        plan.arguments.push_back(alias && alias->isWrite() ? WRITE : READ);
    }
    return plan;
}

void report(const at::Tensor &tensor, Access how) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.layout() != c10::kStrided) return;
    auto *self = tensor.unsafeGetTensorImpl();
    if (self->has_symbolic_sizes_strides() || !tensor.numel()) return;
    if (self->key_set().has(c10::DispatchKey::Python)) return; // the operators on its parts are reported
    bool is_on_host = tensor.is_cpu();
    if (!is_on_host && !tensor.is_cuda()) return;
    auto base = (const char *)self->unsafe_storage().unsafeGetStorageImpl()->data();
    if (!base || (is_on_host && ghost_place(base) != 2)) return;
    size_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
    uint64_t start = (uint64_t)base + tensor.storage_offset() * tensor.element_size();
    race_argument(start, (last + 1) * tensor.element_size(), how, is_on_host);
}

void report(const c10::IValue &value, Access how) {
    if (value.isTensor()) report(value.toTensor(), how);
    if (value.isList())
        for (const c10::IValue element : value.toList()) report(element, how);
}

bool is_operator(const at::RecordFunction &call) {
    return call.scope() == at::RecordScope::FUNCTION && call.operator_schema().has_value();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction &call) {
    race_push(call.name(), is_operator(call));
    if (!is_operator(call)) return nullptr;
    const Plan &plan = plan_of(call);
    auto inputs = call.inputs();
    for (size_t i = 0; !plan.is_ignored && i < std::min(inputs.size(), plan.arguments.size()); i++)
        report(inputs[i], plan.arguments[i]);
    return nullptr;
}

void end(const at::RecordFunction &call, at::ObserverContext *) {
    if (is_operator(call)) {
        const Plan &plan = plan_of(call);
        const auto &outputs = call.outputs();
        for (size_t i = 0; i < std::min(outputs.size(), plan.is_new_result.size()); i++)
            if (plan.is_new_result[i] && outputs[i].isTensor() && !outputs[i].toTensor().is_cpu())
                report(outputs[i], WRITE);
    }
    race_pop();
}

void trace(const c10::CachingDeviceAllocator::TraceEntry &entry) {
    using Entry = c10::CachingDeviceAllocator::TraceEntry;
    if (entry.action_ == Entry::ALLOC) race_alloc(entry.addr_, entry.size_, entry.stream_);
    if (entry.action_ == Entry::FREE_REQUESTED) race_free(entry.addr_);
    if (entry.action_ == Entry::SEGMENT_FREE || entry.action_ == Entry::SEGMENT_UNMAP)
        race_unmap(entry.addr_, entry.size_);
}

} // namespace

extern "C" void race_attach() {
    at::addGlobalCallback(at::RecordFunctionCallback(begin, end).needsInputs(true).needsOutputs(true).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

// Call this after CUDA is initialized, because the allocators of the devices do not exist before.
extern "C" void race_attach_allocator() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(trace); }
