// Pictures of a V4L2 camera, or NV12 of standard input, until an interrupt or the end.
#pragma once
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <linux/videodev2.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tandem_stages.hpp>

inline volatile std::sig_atomic_t stopped = 0;

inline void stop_at_signals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { stopped = 1; };
  for (const int number : {SIGINT, SIGTERM}) sigaction(number, &action, nullptr);  // reads end: no SA_RESTART
}

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }
[[noreturn]] inline void fail_of_system(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

struct Pictures {
  virtual ~Pictures() = default;
  virtual bool next() = 0;  // the next one into `picture`; false at the end
  tandem::CameraPicture picture = {};
  double time_s = 0.0;
};

struct StandardInput : Pictures {  // 30 a second
  StandardInput(std::size_t width, std::size_t height) : bytes(width * height * 3 / 2) {
    picture = {bytes.data(), width, height, width, false};
  }
  bool next() override {
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t count = read(STDIN_FILENO, bytes.data() + at, bytes.size() - at);
      if (stopped || (count == 0 && at == 0)) return false;
      if (count < 0 && errno != EINTR) fail_of_system("standard input cannot be read");
      if (count == 0) fail("standard input ended within a frame: give the WIDTH and HEIGHT that its frames have");
      if (count > 0) at += static_cast<std::size_t>(count);
    }
    time_s = static_cast<double>(count++) / 30.0;
    return true;
  }
  std::vector<std::uint8_t> bytes;
  std::size_t count = 0;
};

struct Camera : Pictures {  // they lie in the driver's memory, which the end of the process gives back
  Camera(const std::string& name, std::size_t width, std::size_t height)
      : path(name), file(open(name.c_str(), O_RDWR)) {
    if (file < 0) fail_of_system(path + " cannot be opened (name a camera of /dev/video*, join the group video)");
    v4l2_format format = {};
    for (const std::uint32_t pixels : {V4L2_PIX_FMT_NV12, V4L2_PIX_FMT_YUYV}) {
      format.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
      format.fmt.pix = {};
      format.fmt.pix.width = static_cast<std::uint32_t>(width);
      format.fmt.pix.height = static_cast<std::uint32_t>(height);
      format.fmt.pix.pixelformat = pixels;
      call(VIDIOC_S_FMT, &format, "captures no frames (name another of /dev/video*)");
      if (format.fmt.pix.pixelformat == pixels) break;
    }
    const auto& got = format.fmt.pix;  // the driver's choice
    if (got.pixelformat != V4L2_PIX_FMT_NV12 && got.pixelformat != V4L2_PIX_FMT_YUYV)
      fail(path + " gives neither NV12 nor YUYV: decode its frames elsewhere, and give them to standard input");
    picture = {nullptr, got.width, got.height, got.bytesperline, got.pixelformat == V4L2_PIX_FMT_YUYV};
    start();
  }
  void start() {
    v4l2_requestbuffers request = {};
    request.count = 4;
    request.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    request.memory = V4L2_MEMORY_MMAP;
    call(VIDIOC_REQBUFS, &request, "gives no memory (another program may have it)");
    for (std::uint32_t index = 0; index < request.count; ++index) {
      buffer.index = index, buffer.type = request.type, buffer.memory = request.memory;
      call(VIDIOC_QUERYBUF, &buffer, "gives no memory");
      void* memory = mmap(nullptr, buffer.length, PROT_READ, MAP_SHARED, file, buffer.m.offset);
      if (memory == MAP_FAILED) fail_of_system(path + ": its memory cannot be mapped");
      frames.push_back(static_cast<const std::uint8_t*>(memory));
      call(VIDIOC_QBUF, &buffer, "takes no memory back");
    }
    call(VIDIOC_STREAMON, &request.type, "does not start (another program may have it)");
  }
  bool next() override {
    do {
      if (is_taken) call(VIDIOC_QBUF, &buffer, "takes no memory back (is it still connected?)");
      is_taken = false;
      while (ioctl(file, VIDIOC_DQBUF, &buffer) != 0) {
        if (stopped) return false;
        if (errno != EINTR) fail_of_system(path + " gives no frame (is it still connected?)");
      }
      is_taken = true;
    } while (buffer.flags & V4L2_BUF_FLAG_ERROR);  // a damaged frame
    time_s = static_cast<double>(buffer.timestamp.tv_sec) + static_cast<double>(buffer.timestamp.tv_usec) * 1e-6;
    picture.bytes = frames[buffer.index];
    return !stopped;
  }
  void call(unsigned long request, void* value, const char* failure) {
    if (ioctl(file, request, value) != 0) fail_of_system(path + " " + failure);
  }
  std::string path;
  int file;
  v4l2_buffer buffer = {};
  std::vector<const std::uint8_t*> frames;
  bool is_taken = false;
};
