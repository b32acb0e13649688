#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace quasar {
namespace {

// Some tens of microseconds: longer than what lies between two products of one forward.
constexpr int kSpins = 4000;
constexpr int64_t kMostParts = UINT16_MAX;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A forked child has none of its parent's threads: a pool from before the fork works alone in it.
std::atomic<int> forks{0};

void watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); }); });
#endif
}

// The parts of one thread's share that nobody has taken: the first in the upper half, the one behind the last in the
// lower. Who takes one sees all that was written before they were given.
class alignas(64) Share {
 public:
  void give(int64_t begin, int64_t end) {
    state_.store(static_cast<uint32_t>(begin << 16 | end), std::memory_order_release);
  }

  // The owner takes the first, who helps out the last: so each reads memory in one direction.
  std::optional<int64_t> take(bool first) {
    uint32_t seen = state_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t begin = seen >> 16, end = seen & UINT16_MAX;
      if (begin == end) return std::nullopt;
      if (state_.compare_exchange_weak(seen, first ? seen + (1u << 16) : seen - 1, std::memory_order_acq_rel)) {
        return first ? begin : end - 1;
      }
    }
  }

 private:
  std::atomic<uint32_t> state_{0};
};

// Moves the beginning of a thread's share of some memory to its cache, step by step.
class Fetching {
 public:
  Fetching(Memory memory, int64_t thread, int64_t threads)
      : at_(static_cast<const char*>(memory.begin) + memory.bytes * thread / threads),
        left_(std::min(memory.bytes / threads, kMost)) {}

  bool step() {
    if (left_ <= 0) return false;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + line * kLine, 0, 2);
    at_ += kLines * kLine;
    left_ -= kLines * kLine;
    return true;
  }

 private:
  static constexpr int64_t kMost = int64_t{128} << 10;  // leaves room in a core's second cache for what is at work
  static constexpr int kLine = 64, kLines = 4;
  const char* at_;
  int64_t left_;
};

}  // namespace

// One job at a time. The caller waits until all parts are done, not until all threads have woken up.
struct ThreadPool::Shared {
  explicit Shared(int threads) : shares(threads) {}

  alignas(64) std::atomic<uint32_t> job{0};  // its number, by which threads know that there is a new one
  alignas(64) std::atomic<uint32_t> unfinished{0};
  // Written before the job is announced; read by those who hold a part of it.
  alignas(64) Function function = nullptr;
  const void* context = nullptr;
  std::atomic<const void*> next{nullptr};
  std::atomic<int64_t> next_bytes{0};
  std::vector<Share> shares;
  std::atomic_flag failed;
  std::exception_ptr error;

  alignas(64) std::atomic<bool> busy{false};
  std::atomic<bool> closing{false};
  const int forks_before = forks.load();
  std::vector<std::thread> threads;

  void begin(int64_t parts, Function f, const void* c, Memory upcoming) {
    const int64_t n = static_cast<int64_t>(shares.size());
    function = f;
    context = c;
    next.store(upcoming.begin, std::memory_order_relaxed);
    next_bytes.store(upcoming.bytes, std::memory_order_relaxed);
    failed.clear();
    error = nullptr;
    unfinished.store(static_cast<uint32_t>(parts), std::memory_order_relaxed);
    for (int64_t i = 0; i < n; ++i) shares[i].give(parts * i / n, parts * (i + 1) / n);
    announce();
  }

  void announce() {
    job.fetch_add(1, std::memory_order_acq_rel);
    job.notify_all();
  }

  void work(size_t self) {
    uint32_t done = 0;
    for (size_t i = 0; i < shares.size(); ++i) {
      Share& share = shares[(self + i) % shares.size()];
      while (const std::optional<int64_t> part = share.take(i == 0)) {
        run_part(*part);
        ++done;
      }
    }
    if (done > 0 && unfinished.fetch_sub(done, std::memory_order_acq_rel) == done) unfinished.notify_one();
  }

  void run_part(int64_t part) {
    if (failed.test()) return;
    try {
      function(context, part);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  }

  // Until the value is another one.
  void wait(size_t self, std::atomic<uint32_t>& value, uint32_t old) {
    Fetching fetching({next.load(std::memory_order_relaxed), next_bytes.load(std::memory_order_relaxed)},
                      static_cast<int64_t>(self), static_cast<int64_t>(shares.size()));
    for (int spin = 0; spin < kSpins; ++spin) {
      if (value.load(std::memory_order_acquire) != old) return;
      if (!fetching.step()) pause();
    }
    value.wait(old, std::memory_order_acquire);
  }

  void wait_for_all() {
    while (const uint32_t left = unfinished.load(std::memory_order_acquire)) wait(0, unfinished, left);
  }

  void serve(size_t self) {
    for (;;) {
      const uint32_t number = job.load(std::memory_order_acquire);  // before `closing`, which is announced as a job is
      if (closing.load(std::memory_order_acquire)) return;
      work(self);
      wait(self, job, number);
    }
  }

  void close() {
    closing.store(true);
    announce();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  if (threads_ == 1) return;
  watch_forks();
  shared_ = std::make_unique<Shared>(threads_);
  try {
    for (int i = 1; i < threads_; ++i) shared_->threads.emplace_back([shared = shared_.get(), i] { shared->serve(i); });
  } catch (...) {
    shared_->close();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (!shared_) return;
  if (shared_->forks_before == forks.load()) {
    shared_->close();
  } else {
    static_cast<void>(shared_.release());  // its threads live in the parent; there is nothing here to join
  }
}

void ThreadPool::run(int64_t parts, Function function, const void* context, Memory next) {
  const bool alone = !shared_ || parts < 2 || parts > kMostParts ||
                     shared_->forks_before != forks.load(std::memory_order_relaxed);
  if (alone || shared_->busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t part = 0; part < parts; ++part) function(context, part);
    return;
  }
  shared_->begin(parts, function, context, next);
  shared_->work(0);
  shared_->wait_for_all();
  const std::exception_ptr error = std::exchange(shared_->error, nullptr);
  shared_->busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

}  // namespace quasar
