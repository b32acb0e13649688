// A pool of threads for loops of a few microseconds: it waits actively for a moment before it sleeps, and uses that
// moment to fetch what the next loop will read.
#pragma once

#include <cstdint>
#include <memory>

namespace quasar {

struct Memory {
  const void* begin = nullptr;
  int64_t bytes = 0;
};

// `parallel` may be called from several threads at once; the pool serves one of them, the others do their work alone.
// Which thread runs which part is not defined, so parts must not share what they write.
class ThreadPool {
 public:
  // `threads` counts the caller: a pool of one starts no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // Runs work(part) for each part of 0..parts-1 and returns when all are done. A thread begins with the parts of its
  // own share, first to last, and then helps others out. The first exception of a part is rethrown here; parts that
  // nobody has begun are then left out. `next` is what the next loop reads from end to end, if that is known: threads
  // that wait for it move the beginning of their shares to their caches.
  template <class Work>
  void parallel(int64_t parts, const Work& work, Memory next = {}) {
    run(parts, [](const void* context, int64_t part) { (*static_cast<const Work*>(context))(part); }, &work, next);
  }

 private:
  using Function = void (*)(const void* context, int64_t part);
  struct Shared;

  void run(int64_t parts, Function function, const void* context, Memory next);

  int threads_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace quasar
