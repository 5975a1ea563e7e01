#include "svg.h"

#include <pacer/files/number_text.h>

#include "whole_file.h"

namespace examples::svg {
namespace {

std::string class_of(const std::string& kind) { return kind.empty() ? "" : attribute("class", kind); }

std::string hinted(const std::string& element, const std::string& attributes, const std::string& hint) {
  const std::string begin = "<" + element + attributes;
  if (hint.empty()) return begin + "/>\n";
  return begin + "><title>" + escape(hint) + "</title></" + element + ">\n";
}

}  // namespace

std::string escape(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    safe += c == '&'    ? "&amp;"
            : c == '<'  ? "&lt;"
            : c == '>'  ? "&gt;"
            : c == '"'  ? "&quot;"
            : c == '\'' ? "&#39;"
                        : std::string(1, c);
  }
  return safe;
}

std::string pixels(double value) { return pacer::fixed_text(value, 1); }

std::string attribute(const std::string& name, const std::string& value) {
  return " " + name + "=\"" + escape(value) + "\"";
}

std::string text_at(const std::string& kind, double x, double y, const std::string& anchor,
                    const std::string& text) {
  return "<text" + class_of(kind) + attribute("x", pixels(x)) + attribute("y", pixels(y)) +
         attribute("text-anchor", anchor) + ">" + escape(text) + "</text>\n";
}

std::string segment(const std::string& kind, double x1, double y1, double x2, double y2) {
  return "<line" + class_of(kind) + attribute("x1", pixels(x1)) + attribute("y1", pixels(y1)) +
         attribute("x2", pixels(x2)) + attribute("y2", pixels(y2)) + "/>\n";
}

std::string rectangle(const std::string& kind, double x, double y, double width, double height,
                      const std::string& hint, const std::string& more) {
  return hinted("rect",
                class_of(kind) + attribute("x", pixels(x)) + attribute("y", pixels(y)) +
                    attribute("width", pixels(width)) + attribute("height", pixels(height)) + more,
                hint);
}

std::string dot(const std::string& kind, double x, double y, const std::string& hint) {
  return hinted(
      "circle",
      class_of(kind) + attribute("cx", pixels(x)) + attribute("cy", pixels(y)) + attribute("r", "3"), hint);
}

std::string picture(const std::string& title, double width, double height, const std::string& content) {
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + pixels(width) + " " + pixels(height) +
         "\"" + attribute("width", pixels(width)) + attribute("height", pixels(height)) +
         " style=\"color-scheme:light dark;max-width:100%;height:auto\" role=\"img\">\n<title>" +
         escape(title) + "</title>\n" + content + "</svg>\n";
}

void save(const std::string& path, const std::string& picture) { write_whole_file(path, picture); }

}  // namespace examples::svg
