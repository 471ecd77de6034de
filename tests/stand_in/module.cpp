// What Python sees of the stand-in, and the backend of torch.distributed whose collectives Python carries out.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <utility>

#include "device.h"

namespace stand_in {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Works = c10::intrusive_ptr<c10d::Work>;

// As NCCL's work: to wait orders the current stream behind it, and does not block the host unless a time is given. Its
// tensors are held until then.
class StreamWork : public c10d::Work {
   public:
    StreamWork(c10::Device device, int stream, Tensors held, const Tensors& results, bool is_barrier)
        : device_(device), stream_(stream), held_(std::move(held)), results_(results), is_barrier_(is_barrier) {
        record(end_, stream);
        future_ = c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
        future_->markCompleted(c10::IValue(results_));
    }
    // Nobody waited: NCCL's watchdog holds them until they are no longer used.
    ~StreamWork() override {
        for (const Tensor& x : held_) record_use((void*)x.storage().data(), stream_);
    }
    bool isCompleted() override { return query(end_); }
    bool isSuccess() const override { return true; }
    Tensors result() override { return results_; }
    void synchronize() override {
        order(current_stream(device_.index()), end_.clock);
        held_.clear();
    }
    bool wait(std::chrono::milliseconds timeout) override {
        synchronize();
        if (is_barrier_ || timeout != kNoTimeout) host_waits_for(end_.clock);
        return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

   private:
    c10::Device device_;
    int stream_;
    Tensors held_, results_;
    bool is_barrier_;
    Event end_;
    c10::intrusive_ptr<at::ivalue::Future> future_;
};

struct Call {
    std::string verb;
    Tensors outputs, inputs;
    int root;  // or the peer
    std::string reduction;
};

std::string name_of(const c10d::ReduceOp& op) {
    switch (op.op_) {
        case c10d::ReduceOp::SUM: return "sum";
        case c10d::ReduceOp::AVG: return "avg";
        case c10d::ReduceOp::MIN: return "min";
        case c10d::ReduceOp::MAX: return "max";
        case c10d::ReduceOp::PRODUCT: return "product";
        default: TORCH_CHECK(false, "the stand-in does not reduce by this operation");
    }
}

Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const Tensors& one : lists) all.insert(all.end(), one.begin(), one.end());
    return all;
}

// A backend of one device, on a stream of its own. `implementation` is asked by
// `carry_out([(verb, outputs, inputs, root, reduction), ...], is_batch, device)`, with tensors of the host that share
// the device's memory.
class StandInBackend : public c10d::Backend {
   public:
    StandInBackend(int rank, int size, std::string name, py::object implementation)
        : Backend(rank, size), name_(std::move(name)), implementation_(std::move(implementation)) {}
    ~StandInBackend() override {
        py::gil_scoped_acquire gil;
        implementation_ = py::object();
    }

    const std::string getBackendName() const override { return name_; }
    bool supportsCoalescing() const override { return true; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return calls_; }
    void shutdown() override { tell("close"); }
    void abort() override { tell("close"); }

    void startCoalescing() override {
        is_coalescing_ = true;
        pending_.clear();
    }
    Works endCoalescing() override {
        is_coalescing_ = false;
        std::vector<Call> calls;
        calls.swap(pending_);
        return calls.empty() ? Works() : run(calls, true, false, true);
    }

    Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return start({"broadcast", tensors, {}, (int)options.rootRank, ""}, options.asyncOp);
    }
    Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return start({"all_reduce", tensors, {}, 0, name_of(options.reduceOp)}, options.asyncOp);
    }
    Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        std::vector<Call> calls;
        for (const Tensor& one : tensors) calls.push_back({"all_reduce", {one}, {}, 0, name_of(options.reduceOp)});
        return run(calls, options.asyncOp);
    }
    Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        return start({"reduce", tensors, {}, (int)options.rootRank, name_of(options.reduceOp)}, options.asyncOp);
    }
    Works allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        return start({"all_gather", flat(outputs), inputs, 0, ""}, options.asyncOp);
    }
    Works _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
        return start({"all_gather", {output}, {input}, 0, ""}, options.asyncOp);
    }
    Works allgather_into_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        std::vector<Call> calls;
        for (std::size_t i = 0; i < inputs.size(); i++)
            calls.push_back({"all_gather", {outputs[i]}, {inputs[i]}, 0, ""});
        return run(calls, options.asyncOp);
    }
    Works gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
        return start({"gather", flat(outputs), inputs, (int)options.rootRank, ""}, options.asyncOp);
    }
    Works scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
        return start({"scatter", outputs, flat(inputs), (int)options.rootRank, ""}, options.asyncOp);
    }
    Works reduce_scatter(
        Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
        return start({"reduce_scatter", outputs, flat(inputs), 0, name_of(options.reduceOp)}, options.asyncOp);
    }
    Works _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
        return start({"reduce_scatter", {output}, {input}, 0, name_of(options.reduceOp)}, options.asyncOp);
    }
    Works reduce_scatter_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
        std::vector<Call> calls;
        for (std::size_t i = 0; i < inputs.size(); i++)
            calls.push_back({"reduce_scatter", {outputs[i]}, {inputs[i]}, 0, name_of(options.reduceOp)});
        return run(calls, options.asyncOp);
    }
    Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
        return start({"all_to_all", outputs, inputs, 0, ""}, options.asyncOp);
    }
    Works alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions& options) override {
        auto parts = [&](const Tensor& x, const std::vector<int64_t>& sizes) {
            Tensors made;
            int64_t begin = 0;
            for (int rank = 0; rank < getSize(); rank++) {
                int64_t size = sizes.empty() ? x.size(0) / getSize() : sizes[rank];
                made.push_back(x.narrow(0, begin, size));
                begin += size;
            }
            return made;
        };
        return start({"all_to_all", parts(output, outputs), parts(input, inputs), 0, ""}, options.asyncOp);
    }
    Works send(Tensors& tensors, int peer, int) override { return start({"send", {}, tensors, peer, ""}, true); }
    Works recv(Tensors& tensors, int peer, int) override { return start({"recv", tensors, {}, peer, ""}, true); }
    Works barrier(const c10d::BarrierOptions& options) override {
        c10::Device device(c10::DeviceType::PrivateUse1, (c10::DeviceIndex)device_index());
        Tensor one = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device));
        return run({{"all_reduce", {one}, {}, 0, "sum"}}, options.asyncOp, true);
    }

   private:
    int device_index() const {
        return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index();
    }
    void tell(const char* what) {
        py::gil_scoped_acquire gil;
        implementation_.attr(what)();
    }
    Works start(Call call, bool is_async) {
        if (!is_coalescing_) return run({std::move(call)}, is_async);
        pending_.push_back(std::move(call));
        return Works();
    }

    Works run(const std::vector<Call>& calls, bool is_async, bool is_barrier = false, bool is_batch = false) {
        Tensors all, results;
        for (const Call& call : calls) {
            all.insert(all.end(), call.outputs.begin(), call.outputs.end());
            all.insert(all.end(), call.inputs.begin(), call.inputs.end());
            results.insert(results.end(), call.outputs.begin(), call.outputs.end());
        }
        for (const Tensor& x : all) {
            TORCH_CHECK(x.device().type() == c10::DeviceType::PrivateUse1 && x.device() == all[0].device(),
                        name_, " carries tensors of one device only, and got one on ", x.device());
            TORCH_CHECK(x.is_contiguous(), name_, " carries contiguous tensors only");
        }
        calls_++;
        c10::Device device = all[0].device();
        const c10::impl::DeviceGuardImplInterface* guard = c10::impl::getDeviceGuardImpl(device.type());
        c10::Stream callers = guard->getStream(device);
        if (is_async) {
            if (stream_ < 0) stream_ = make_stream();
            order(stream_, clock_of(current_stream(device.index())));
            guard->exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, stream_));
        }
        int stream = current_stream(device.index());
        try {
            for (const Call& call : calls) {
                for (const Tensor& x : call.inputs) touch_tensor(call.verb, x, false);
                for (const Tensor& x : call.outputs) touch_tensor(call.verb, x, true);
            }
            py::gil_scoped_acquire gil;
            py::list given;
            auto views = [](const Tensors& tensors) {
                py::list made;
                for (const Tensor& x : tensors) made.append(host_view(x));
                return made;
            };
            for (const Call& call : calls)
                given.append(py::make_tuple(call.verb, views(call.outputs), views(call.inputs), call.root,
                                            call.reduction));
            implementation_.attr("carry_out")(given, is_batch, device.index());
        } catch (...) {
            guard->exchangeStream(callers);
            throw;
        }
        auto work = c10::make_intrusive<StreamWork>(device, stream, is_async ? all : Tensors(), results, is_barrier);
        guard->exchangeStream(callers);
        return work;
    }

    std::string name_;
    py::object implementation_;
    int stream_ = -1;
    bool is_coalescing_ = false;
    std::vector<Call> pending_;
    uint64_t calls_ = 0;
};

// DDP warns if it cannot time a device.
class NoTimer : public c10d::Timer {
   public:
    explicit NoTimer(std::optional<c10::Device>) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace
}  // namespace stand_in

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, ::stand_in::NoTimer)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace stand_in;
    m.def("register_hooks", &register_hooks);
    m.def("set_device_count", &set_device_count);
    m.def("device_count", &device_count);
    m.def("host_view", &host_view, "The same memory as a tensor of the host, which orders nothing.");
    m.def("access", [](const std::string& what, int device, Address memory, std::size_t nbytes, bool writes) {
        py::gil_scoped_release free;
        access(what, current_stream(device), (void*)memory, nbytes, writes);
    }, "A kernel on the current stream of a device reads or writes memory.",
       py::arg("what"), py::arg("device"), py::arg("memory"), py::arg("nbytes"), py::arg("writes"));
    m.def("rest_of_block", &rest_of_block, "The bytes from an address to the end of what was allocated; 0: not ours.");
    m.def("take_reports", &take_reports, "What was found wrong since the last call.");
    m.def("host_waits", &host_waits, "How often the host waited for something that it did not know to be done.");
    m.def("enter_as_host", &enter_as_host, "From now on this thread knows what it waits for itself, and is told.");
    m.def("leave_as_host", &leave_as_host);
    m.def("host_clock", [] { return host_clock().epochs; }, "What this thread knows to be done.");
    m.def("tell_host", [](const std::vector<uint64_t>& epochs) { tell_host(Clock{epochs}); }, "It is known here, too.");
    m.def("synchronize", &host_waits_for_all, py::call_guard<py::gil_scoped_release>());
    m.def("make_backend", [](int rank, int size, const std::string& name, py::object implementation) {
        c10::intrusive_ptr<c10d::Backend> made =
            c10::make_intrusive<StandInBackend>(rank, size, name, std::move(implementation));
        return made;
    });
}
