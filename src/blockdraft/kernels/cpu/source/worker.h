// One thread beside all others, for what a later call is going to need: it works while nothing else
// does, as between two passes of a target. It runs on the cores of the thread that starts it.

#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <unistd.h>

namespace blockdraft {

// A piece of work. `run` of its argument must throw nothing.
class Task {
 public:
  Task(void (*run)(void*), void* argument) : run_(run), argument_(argument) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() { finish(); }

  // The worker may do it from now on; it was finished before, so that its argument could be changed.
  // Nobody does it if another one waits, or there is no worker.
  void begin();

  // True if the worker has done it since it was begun last; after this it is not begun.
  bool finish();

 private:
  friend class Worker;

  void (*run_)(void*);
  void* argument_;
  bool is_begun_ = false;  // known to its owner only
  std::atomic<bool> is_done_{false};
};

class Worker {
 public:
  // Null where the system has no more threads. It is never destroyed: its thread may outlive all
  // objects of the library.
  static Worker* only() {
    static Worker* const worker = started();
    return worker;
  }

  // False in a process that was forked off, which has no such thread, and its lock may be held.
  bool is_here() const { return getpid() == process_; }

  // False if another task waits, or nothing is begun any more.
  bool offer(Task* task) {
    if (!is_here()) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (has_ended_ || next_ != nullptr) return false;
      next_ = task;
    }
    has_next_.notify_one();
    return true;
  }

  // True if it was still waiting.
  bool withdraw(const Task* task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next_ != task) return false;
    next_ = nullptr;
    return true;
  }

  // Begins nothing any more, and waits for what is under way.
  void end() {
    if (!is_here()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    has_ended_ = true;
    is_idle_.wait(lock, [this] { return !is_working_; });
  }

 private:
  static Worker* started() {
    try {
      Worker* worker = new Worker;
      std::thread([worker] { worker->work(); }).detach();
      return worker;
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      has_next_.wait(lock, [this] { return next_ != nullptr && !has_ended_; });
      Task* task = std::exchange(next_, nullptr);
      is_working_ = true;
      lock.unlock();
      task->run_(task->argument_);
      task->is_done_.store(true, std::memory_order_release);  // its owner may delete it now
      lock.lock();
      is_working_ = false;
      is_idle_.notify_all();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable has_next_, is_idle_;
  Task* next_ = nullptr;
  bool is_working_ = false, has_ended_ = false;
};

inline void Task::begin() {
  Worker* worker = Worker::only();
  is_done_.store(false, std::memory_order_relaxed);
  is_begun_ = worker != nullptr && worker->offer(this);
}

inline bool Task::finish() {
  if (!is_begun_) return false;
  is_begun_ = false;
  Worker* worker = Worker::only();
  if (!worker->is_here() || worker->withdraw(this)) return false;
  while (!is_done_.load(std::memory_order_acquire)) std::this_thread::yield();
  return true;
}

}  // namespace blockdraft
