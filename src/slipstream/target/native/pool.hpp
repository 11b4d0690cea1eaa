// Threads that share the parts of a job, and wait without spinning between passes.
//
// A thread begins with a stretch of its own, so that it reads memory in one go. Parts are taken one
// by one, and when a thread has none left it takes from the others: one that loses its core to
// another process delays only the part it holds.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
 public:
  explicit Pool(int num_threads) : tickets_(num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
  }

  std::mutex turn;  // held by whoever uses the pool

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Workers stay awake from `open` to `close`.
  void open() {
    if (threads_.empty()) return;
    wake();
  }
  void close() { awake_.store(0); }

  // Calls body(part, thread) for every part; returns when all are done.
  template <class Body>
  void run(int parts, Body& body) {
    if (threads_.empty() || parts == 1) {
      for (int part = 0; part < parts; ++part) body(part, 0);
      return;
    }
    call_ = [](void* what, int part, int thread) { (*static_cast<Body*>(what))(part, thread); };
    what_ = &body;
    done_.store(0, std::memory_order_relaxed);
    ++job_;
    for (int t = 0; t < size(); ++t) {
      const uint64_t begin = (int64_t)parts * t / size(), end = (int64_t)parts * (t + 1) / size();
      tickets_[t].next.store(job_ << 48 | end << 24 | begin, std::memory_order_release);
    }
    while (take(0)) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) < parts;) relax(spins);
  }

 private:
  struct alignas(64) Ticket {  // which job (16 bits), where a stretch ends (24), its next part (24)
    std::atomic<uint64_t> next{0};
  };

  // One part: of the thread's own stretch, else of another's.
  bool take(int thread) {
    for (int i = 0; i < size(); ++i)
      if (take_from(tickets_[(thread + i) % size()].next, thread)) return true;
    return false;
  }

  bool take_from(std::atomic<uint64_t>& stretch, int thread) {
    uint64_t ticket = stretch.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = ticket & 0xffffff, end = ticket >> 24 & 0xffffff;
      if (next >= end) return false;
      if (stretch.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        call_(what_, static_cast<int>(next), thread);
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void serve(int thread) {
    int spins = 0;
    for (;;) {
      awake_.wait(0);
      while (awake_.load(std::memory_order_relaxed)) {
        if (take(thread)) {
          spins = 0;
        } else {
          relax(spins);
        }
      }
    }
  }

  static void relax(int& spins) {
    if (++spins < 2000) {
      _mm_pause();
    } else {
      sched_yield();  // somebody else needs the core
    }
  }

  void wake() {
    awake_.store(1);
    awake_.notify_all();
  }

  std::vector<std::thread> threads_;
  std::atomic<int> awake_{0};
  std::vector<Ticket> tickets_;  // of each thread
  uint64_t job_ = 0;
  alignas(64) std::atomic<int> done_{0};
  void (*call_)(void*, int, int) = nullptr;
  void* what_ = nullptr;
};

// One pool per number of threads serves all models of a process. It is never taken down: a forked
// child has none of its threads to wait for.
inline Pool& shared_pool(int num_threads) {
  static std::mutex mutex;
  static auto* pools = new std::map<int, Pool*>;
  const std::lock_guard<std::mutex> alone(mutex);
  Pool*& pool = (*pools)[num_threads];
  if (!pool) pool = new Pool(num_threads);
  return *pool;
}
