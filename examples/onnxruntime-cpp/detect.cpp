// Objects of pictures with a file of `yolofleet export --nms`, as lines of JSON: ./detect best.onnx street.jpg
//
// ONNX Runtime is a release of github.com/microsoft/onnxruntime, unpacked in $ORT; on Debian stb_image.h is in libstb-dev
// (-I /usr/include/stb), and json.hpp in nlohmann-json3-dev:
// g++ -std=c++17 -O2 detect.cpp -I $ORT/include -I /usr/include/stb -L $ORT/lib -Wl,-rpath,$ORT/lib -lonnxruntime -o detect

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#define STB_IMAGE_IMPLEMENTATION
#include <stb_image.h>

constexpr float GREY = 114;  // of the border

struct Prepared {
  std::vector<float> input;  // [1, 3, H, W] RGB in 0..1
  std::array<float, 2> factors;  // pixels of the input for one of the picture, along x and y
  std::array<int, 2> padding;
  std::array<int, 2> size;  // width and height of the picture
};

struct Place {  // of a pixel of the input in the picture
  int before, after;
  float part;
};

std::vector<Place> places(int count, int of) {  // bilinear, as OpenCV
  std::vector<Place> found;
  for (int i = 0; i < count; ++i) {
    const double place = std::clamp((i + 0.5) * of / count - 0.5, 0.0, of - 1.0);
    const int low = static_cast<int>(place);
    found.push_back({low, std::min(low + 1, of - 1), static_cast<float>(place - low)});
  }
  return found;
}

// Read a picture and fit it in the input. stb_image does not turn a picture as its EXIF data says.
Prepared prepared(const std::string& file, int high, int wide) {
  int width, height, channels;
  stbi_uc* pixels = stbi_load(file.c_str(), &width, &height, &channels, 3);
  if (!pixels) throw std::runtime_error(file + ": " + stbi_failure_reason());
  const double factor = std::min(double(high) / height, double(wide) / width);
  const int w = std::nearbyint(width * factor), h = std::nearbyint(height * factor);
  const int left = (wide - w) / 2, top = (high - h) / 2;
  std::vector<float> input(3 * high * wide, GREY / 255);
  const auto columns = places(w, width), rows = places(h, height);
  for (int y = 0; y < h; ++y) {
    for (int x = 0; x < w; ++x) {
      for (int c = 0; c < 3; ++c) {
        const auto along = [&](int row) {
          const stbi_uc* line = pixels + size_t(row) * width * 3 + c;
          return line[columns[x].before * 3] * (1 - columns[x].part) + line[columns[x].after * 3] * columns[x].part;
        };
        const int upper = 4 * along(rows[y].before) * (1 - rows[y].part), lower = 4 * along(rows[y].after) * rows[y].part;
        input[(c * high + top + y) * wide + left + x] = ((upper + lower + 2) >> 2) / 255.f;  // OpenCV's rounding
      }
    }
  }
  stbi_image_free(pixels);
  return {input, {float(w) / width, float(h) / height}, {left, top}, {width, height}};
}

int main(int count, char** words) try {
  if (count < 3) throw std::runtime_error("usage: detect MODEL.onnx PICTURE...");
  Ort::Env env;
  Ort::Session session(env, words[1], Ort::SessionOptions{});
  Ort::AllocatorWithDefaultOptions allocator;
  const auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated("yolofleet", allocator);
  if (!text) throw std::runtime_error("the file has no metadata of yolofleet");
  const auto metadata = nlohmann::json::parse(text.get());
  if (metadata["nms"].is_null() || metadata["size_hw"].is_null() ||
      (!metadata["batch"].is_null() && metadata["batch"] != 1))
    throw std::runtime_error("export the weights with --nms, and without --dynamic size and --batch");
  const int high = metadata["size_hw"][0], wide = metadata["size_hw"][1];

  for (int at = 2; at < count; ++at) {
    auto [input, factors, padding, size] = prepared(words[at], high, wide);
    const std::array<int64_t, 4> shape{1, 3, high, wide};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto images =
        Ort::Value::CreateTensor<float>(memory, input.data(), input.size(), shape.data(), shape.size());
    const char *given = "images", *wanted = "boxes";
    const auto answers = session.Run(Ort::RunOptions{}, &given, &images, 1, &wanted, 1);
    const float* row = answers[0].GetTensorData<float>();  // [1, max_det, 6]; unused rows have score 0
    const float* end = row + answers[0].GetTensorTypeAndShapeInfo().GetElementCount();
    for (; row < end && row[4] > 0; row += 6) {
      std::array<float, 4> box;  // x1, y1, x2, y2 in pixels of the picture
      for (int i = 0; i < 4; ++i)
        box[i] = std::clamp((row[i] - padding[i % 2]) / factors[i % 2], 0.f, float(size[i % 2]));
      const nlohmann::json found = {
          {"file", words[at]}, {"name", metadata["names"][int(row[5])]}, {"score", row[4]}, {"box", box}};
      std::cout << found << "\n";
    }
  }
} catch (const std::exception& problem) {
  std::cerr << problem.what() << "\n";
  return 1;
}
