// A device type of torch whose memory is the host's and whose work is done at once, by the CPU's kernels. What a real
// device would have to do in order is told to order.h.

#include "device.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <map>

namespace stand_in {
namespace {

using at::Tensor;

const c10::DeviceType KIND = c10::DeviceType::PrivateUse1;

int device_count_ = 1;
thread_local int current_device = 0;
thread_local std::map<int, int> current_streams;  // by device; the default stream, if there is none

// --- streams ---------------------------------------------------------------------------------------------------------

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

// As torch numbers streams, 0 is the default stream of every device.
int number_of(const c10::Stream& stream) { return stream.id() == 0 ? stream.device_index() : (int)stream.id(); }

c10::Stream stream_of(int number, int device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, (c10::DeviceIndex)device), number == device ? 0 : number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return KIND; }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {KIND, (c10::DeviceIndex)current_device}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < device_count_, "there is no device ", device);
        if (device.index() >= 0) current_device = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0) current_device = device.index();
    }
    c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count_; }
    c10::Stream getStream(c10::Device device) const override {
        return stream_of(current_stream(index_of(device)), index_of(device));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream_of(index_of(device), index_of(device));
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream_of(make_stream(), index_of(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        c10::Stream before = getStream(stream.device());
        current_streams[stream.device_index()] = number_of(stream);
        return before;
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        stand_in::record(*(Event*)*event, number_of(stream));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event) order(number_of(stream), ((Event*)event)->clock);
    }
    bool queryEvent(void* event) const override { return !event || query(*(Event*)event); }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
    void synchronizeEvent(void* event) const override {
        if (event) host_waits_for(((Event*)event)->clock);
    }
    bool queryStream(const c10::Stream& stream) const override { return query_stream(number_of(stream)); }
    void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(clock_of(number_of(stream))); }
    void synchronizeDevice(const c10::DeviceIndex) const override { host_waits_for_all(); }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        record_use(data.get(), number_of(stream));
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        return 1000.0 * (((Event*)second)->recorded_s - ((Event*)first)->recorded_s);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ----------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* memory = stand_in::allocate(nbytes, current_stream(current_device));
        return {memory, memory, &stand_in::release, c10::Device(KIND, (c10::DeviceIndex)current_device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &stand_in::release; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* memory = allocate_pinned(nbytes);
        return {memory, memory, &release_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(KIND, &device_allocator);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count_ > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)device_count_; }
    void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({KIND, index}); }
    c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return Guard().exchangeDevice({KIND, index}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
    bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::globalContext().defaultGenerator(at::kCPU);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

// --- operators -------------------------------------------------------------------------------------------------------

c10::Device device_of(const Tensor& x) { return x.device(); }

// Report that a kernel on the current stream reads or writes a tensor.
void touch(const std::string& what, const Tensor& x, bool writes) {
    if (x.numel() == 0) return;
    std::size_t last = 0;
    for (int64_t dim = 0; dim < x.dim(); dim++) last += (x.size(dim) - 1) * x.stride(dim);
    access(what, current_stream(index_of(device_of(x))), x.const_data_ptr(), (last + 1) * x.element_size(), writes);
}

c10::DispatchKeySet keys_of(c10::DispatchKey backend) { return c10::DispatchKeySet(backend); }

Tensor with_layout_of(const Tensor& x, c10::Storage storage, c10::DispatchKey key) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_of(key), x.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    if (x.is_conj()) made._set_conj(true);
    if (x.is_neg()) made._set_neg(true);
    return made;
}

void keep(void*) {}

bool is_ours(const Tensor& x) { return x.defined() && x.device().type() == KIND; }

// The tensors of one call as the CPU's kernels see them, and back.
class Views {
   public:
    Tensor of(const Tensor& x) {
        for (auto& [ours, view] : pairs_)
            if (ours.is_same(x)) return view;
        Tensor view = host_view(x);
        pairs_.emplace_back(x, view);
        return view;
    }

    // What a kernel returned, as a tensor of the device: one that was passed, a view of one, or a new one.
    Tensor back(const Tensor& made, const std::string& what, int device) {
        if (!made.defined() || !made.is_cpu()) return made;
        for (auto& [ours, view] : pairs_)
            if (view.is_same(made)) return ours;
        for (auto& [ours, view] : pairs_)
            if (view.storage().is_alias_of(made.storage()))
                return with_layout_of(made, ours.storage(), c10::DispatchKey::PrivateUse1);
        std::size_t nbytes = made.storage().nbytes();
        c10::DeviceGuard guard(c10::Device(KIND, (c10::DeviceIndex)device));
        c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, &device_allocator, true);
        memcpy(storage.mutable_data(), made.storage().data(), nbytes);
        Tensor ours = with_layout_of(made, storage, c10::DispatchKey::PrivateUse1);
        touch(what, ours, true);
        return ours;
    }

    // Kernels may give what they write another shape, or more memory.
    void write_back() {
        for (auto& [ours, view] : pairs_) {
            c10::TensorImpl* impl = ours.unsafeGetTensorImpl();
            if (view.storage().data() != ours.storage().data()) {
                resize_storage(ours.storage(), view.storage().nbytes());
                memcpy(ours.storage().mutable_data(), view.storage().data(), view.storage().nbytes());
            }
            if (ours.sizes() != view.sizes() || ours.strides() != view.strides() ||
                ours.storage_offset() != view.storage_offset())
                impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
        }
    }

    static void resize_storage(const c10::Storage& storage, std::size_t nbytes) {
        c10::DeviceGuard guard(storage.device());
        c10::DataPtr memory = device_allocator.allocate(nbytes);
        std::size_t kept = std::min(nbytes, storage.nbytes());
        if (kept) {
            int stream = current_stream(storage.device().index());
            access("resize", stream, storage.data(), kept, false);
            memcpy(memory.mutable_get(), storage.data(), kept);
            access("resize", stream, memory.get(), kept, true);
        }
        storage.set_data_ptr_noswap(std::move(memory));
        storage.set_nbytes(nbytes);
    }

   private:
    std::vector<std::pair<Tensor, Tensor>> pairs_;
};

void wait_for_current_stream(int device) { host_waits_for(clock_of(current_stream(device))); }

// Every operator without a kernel of its own: the CPU's, on the same memory.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    const std::string what = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    bool returns_views = false, returns_numbers = schema.returns().empty();
    for (const c10::Argument& one : schema.returns()) {
        returns_views = returns_views || (one.alias_info() && !one.alias_info()->isWrite());
        c10::TypeKind kind = one.type()->kind();
        returns_numbers = returns_numbers || kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType ||
                          kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType;
    }
    bool moves_nothing = returns_views || op.hasTag(at::Tag::inplace_view);

    auto arguments = torch::jit::last(*stack, schema.arguments().size());
    int device = -1;
    for (const c10::IValue& one : arguments)
        if (one.isTensor() && is_ours(one.toTensor())) device = one.toTensor().device().index();
        else if (one.isDevice() && device < 0) device = index_of(one.toDevice());
        else if (one.isTensorList())
            for (const Tensor& x : one.toTensorVector())
                if (is_ours(x)) device = x.device().index();
    if (device < 0) device = current_device;
    c10::DeviceGuard guard(c10::Device(KIND, (c10::DeviceIndex)device));

    Views views;
    std::vector<std::pair<Tensor, bool>> touched;
    auto view_of = [&](const Tensor& x, bool writes) {
        if (!is_ours(x)) return x;
        touched.emplace_back(x, writes);
        return views.of(x);
    };
    const std::size_t first = stack->size() - schema.arguments().size();
    for (std::size_t i = 0; i < schema.arguments().size(); i++) {
        c10::IValue& one = (*stack)[first + i];
        const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
        bool writes = alias && alias->isWrite();
        if (one.isTensor()) {
            one = view_of(one.toTensor(), writes);
        } else if (one.isTensorList()) {
            std::vector<Tensor> some = one.toTensorVector();
            for (Tensor& x : some) x = view_of(x, writes);
            one = c10::List<Tensor>(some);
        } else if (one.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> some;
            for (std::optional<Tensor> x : one.toOptionalTensorList())
                some.push_back(x && x->defined() ? std::optional<Tensor>(view_of(*x, writes)) : x);
            one = some;
        } else if (one.isDevice() && one.toDevice().type() == KIND) {
            one = c10::Device(c10::DeviceType::CPU);
        }
    }
    if (!moves_nothing) {
        for (auto& [x, writes] : touched)
            if (!writes) touch(what, x, false);
        for (auto& [x, writes] : touched)
            if (writes) touch(what, x, true);
    }
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.callBoxed(stack);
    }
    views.write_back();
    const std::size_t begin = stack->size() - schema.returns().size();
    for (std::size_t i = begin; i < stack->size(); i++) {
        c10::IValue& one = (*stack)[i];
        if (one.isTensor()) {
            one = views.back(one.toTensor(), what, device);
        } else if (one.isTensorList()) {
            std::vector<Tensor> some = one.toTensorVector();
            for (Tensor& x : some) x = views.back(x, what, device);
            one = c10::List<Tensor>(some);
        }
    }
    // A number or a shape that depends on the data: the host waits for it.
    if ((returns_numbers && !schema.returns().empty() && !touched.empty() && !moves_nothing) ||
        op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
        wait_for_current_stream(device);
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                           std::optional<c10::Device> device, std::optional<bool> pin_memory,
                           std::optional<c10::MemoryFormat> format) {
    TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
    c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
    return at::detail::empty_generic(size, &device_allocator, keys_of(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
    TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
    c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
    return at::detail::empty_strided_generic(size, stride, &device_allocator, keys_of(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// As torch copies between a host and a CUDA device: by the queue, if asked, where memory is pinned and nothing has to be
// converted on the host; else the host waits.
void copy_between(const Tensor& from, const Tensor& to, bool non_blocking) {
    bool to_device = is_ours(to);
    const Tensor& ours = to_device ? to : from;
    const Tensor& hosts = to_device ? from : to;
    int device = ours.device().index();
    bool is_direct = hosts.is_contiguous() && (!to_device || (to.is_contiguous() && from.dtype() == to.dtype()));
    bool is_queued = non_blocking && is_direct && is_pinned(hosts.const_data_ptr());
    if (!is_queued && !to_device) {
        touch("copy to the host", from, false);
        wait_for_current_stream(device);
        to.copy_(host_view(from));
        return;
    }
    if (!is_queued) {
        Tensor staged = from.clone();  // read by the host, now
        host_view(to).copy_(staged);
        touch("copy from the host", to, true);
        if (!non_blocking) wait_for_current_stream(device);
        return;
    }
    const char* what = to_device ? "queued copy from the host" : "queued copy to the host";
    touch(what, ours, to_device);
    Unprotected open(hosts.const_data_ptr());
    if (to_device) host_view(to).copy_(from);
    else to.copy_(host_view(from));
    access(what, current_stream(device), hosts.const_data_ptr(), hosts.nbytes(), !to_device);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
    if (is_ours(from) && is_ours(to)) {
        int source = from.device().index(), target = to.device().index();
        // A copy between devices waits for both, and both for it.
        if (source != target) order(current_stream(source), clock_of(current_stream(target)));
        touch("copy", from, false);
        if (source != target) order(current_stream(target), clock_of(current_stream(source)));
        touch("copy", to, true);
        host_view(to).copy_(host_view(from));
        if (source != target) order(current_stream(source), clock_of(current_stream(target)));
        return to;
    }
    Tensor source = from;
    if (source.sizes() != to.sizes()) source = source.expand(to.sizes());
    copy_between(source, to, non_blocking);
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& x) {
    touch("item", x, false);
    wait_for_current_stream(x.device().index());
    return host_view(x).item();
}

Tensor& set_storage_and_layout(Tensor& x, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
    x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    if (stride.data() == nullptr || stride.size() != size.size()) {
        x.unsafeGetTensorImpl()->set_storage_offset(offset);
        x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    } else {
        x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    }
    return x;
}

Tensor& set_storage(Tensor& x, c10::Storage storage) {
    int64_t numel = (int64_t)(storage.nbytes() / x.element_size());
    return set_storage_and_layout(x, storage, 0, {numel}, {});
}

Tensor& set_tensor(Tensor& x, const Tensor& other) {
    return set_storage_and_layout(x, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void record_stream(Tensor& x, c10::Stream stream) { record_use((void*)x.storage().data(), number_of(stream)); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty_memory_format);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar_dense);
    m.impl("set_.source_Storage_storage_offset", set_storage_and_layout);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
    Views::resize_storage(storage, nbytes);
}

}  // namespace

void set_device_count(int count) { device_count_ = count; }
int device_count() { return device_count_; }

void register_hooks() {
    static Hooks hooks;
    if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
}

int current_stream(int device) {
    auto found = current_streams.find(device);
    return found == current_streams.end() ? device : found->second;
}

void host_waits_for_all() {
    for (int stream = 0; stream < stream_count(); stream++) host_waits_for(clock_of(stream));
}

at::Tensor host_view(const at::Tensor& x) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), x.storage().nbytes(),
                         c10::DataPtr((void*)x.storage().data(), nullptr, &keep, c10::Device(c10::DeviceType::CPU)),
                         c10::GetAllocator(c10::DeviceType::CPU), true);
    return with_layout_of(x, storage, c10::DispatchKey::CPU);
}

void touch_tensor(const std::string& what, const at::Tensor& x, bool writes) { touch(what, x, writes); }

}  // namespace stand_in
