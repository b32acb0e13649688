#include "thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
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
constexpr int64_t kMostParts = INT32_MAX;

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

}  // namespace

// One job at a time. `state` holds the number of the job in its upper half and how many of its parts nobody has taken in
// its lower half: a thread that comes late, with the state of an earlier job, takes nothing of this one. The caller
// waits until all parts are done, not until all threads have woken up.
struct ThreadPool::Shared {
  alignas(64) std::atomic<uint64_t> state{0};
  alignas(64) std::atomic<int64_t> unfinished{0};
  // Written before the job is announced; read by those who hold a part of it.
  Function function = nullptr;
  const void* context = nullptr;
  int64_t parts = 0;
  std::atomic_flag failed;
  std::exception_ptr error;

  alignas(64) std::atomic<bool> busy{false};
  std::atomic<bool> closing{false};
  std::mutex mutex;
  std::condition_variable begun, ended;
  const int forks_before = forks.load();
  std::vector<std::thread> threads;

  static uint32_t untaken(uint64_t state) { return static_cast<uint32_t>(state); }

  void begin(int64_t n, Function f, const void* c) {
    function = f;
    context = c;
    parts = n;
    failed.clear();
    error = nullptr;
    unfinished.store(n, std::memory_order_relaxed);
    {
      std::lock_guard lock(mutex);
      const uint64_t number = (state.load(std::memory_order_relaxed) >> 32) + 1;
      state.store(number << 32 | static_cast<uint64_t>(n), std::memory_order_release);
    }
    begun.notify_all();
  }

  void work_on_parts() {
    uint64_t seen = state.load(std::memory_order_acquire);
    while (untaken(seen) > 0) {
      if (!state.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
      try {
        function(context, parts - untaken(seen));
      } catch (...) {
        if (!failed.test_and_set()) error = std::current_exception();
        finish(drop_untaken());
      }
      finish(1);
      seen = state.load(std::memory_order_acquire);
    }
  }

  // Called by who holds a part, so that the job in `state` is the one that failed.
  int64_t drop_untaken() {
    uint64_t seen = state.load(std::memory_order_acquire);
    while (!state.compare_exchange_weak(seen, seen - untaken(seen), std::memory_order_acq_rel)) {
    }
    return untaken(seen);
  }

  void finish(int64_t n) {
    if (n == 0 || unfinished.fetch_sub(n, std::memory_order_acq_rel) != n) return;
    std::lock_guard lock(mutex);
    ended.notify_one();
  }

  template <class Condition>
  void wait(std::condition_variable& signal, const Condition& condition) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (condition()) return;
      pause();
    }
    std::unique_lock lock(mutex);
    signal.wait(lock, condition);
  }

  void serve() {
    while (!closing.load(std::memory_order_acquire)) {
      wait(begun, [&] { return untaken(state.load(std::memory_order_acquire)) > 0 || closing.load(); });
      work_on_parts();
    }
  }

  void close() {
    {
      std::lock_guard lock(mutex);
      closing.store(true);
    }
    begun.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  if (threads_ == 1) return;
  watch_forks();
  shared_ = std::make_unique<Shared>();
  try {
    for (int i = 1; i < threads_; ++i) shared_->threads.emplace_back([shared = shared_.get()] { shared->serve(); });
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

void ThreadPool::run(int64_t parts, Function function, const void* context) {
  const bool alone = !shared_ || parts < 2 || parts > kMostParts ||
                     shared_->forks_before != forks.load(std::memory_order_relaxed);
  if (alone || shared_->busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t part = 0; part < parts; ++part) function(context, part);
    return;
  }
  shared_->begin(parts, function, context);
  shared_->work_on_parts();
  shared_->wait(shared_->ended, [&] { return shared_->unfinished.load(std::memory_order_acquire) == 0; });
  const std::exception_ptr error = std::exchange(shared_->error, nullptr);
  shared_->busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

}  // namespace quasar
