// A pool of threads for loops of a few microseconds: it waits actively for a moment before it sleeps.
#pragma once

#include <cstdint>
#include <memory>

namespace quasar {

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

  // Runs work(part) for each part of 0..parts-1 and returns when all are done. The first exception of a part is
  // rethrown here; parts that nobody has begun are then left out.
  template <class Work>
  void parallel(int64_t parts, const Work& work) {
    run(parts, [](const void* context, int64_t part) { (*static_cast<const Work*>(context))(part); }, &work);
  }

 private:
  using Function = void (*)(const void* context, int64_t part);
  struct Shared;

  void run(int64_t parts, Function function, const void* context);

  int threads_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace quasar
