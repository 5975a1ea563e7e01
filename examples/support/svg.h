// Pieces of SVG pictures as text, for the charts of the study, of the collectives, of the pipeline and of
// scaling. Numbers are written alike in every locale, texts are escaped; colours and fonts come from a style
// sheet, by class.
//
//   picture("Two", 100, 40,
//           kStyle + rectangle("bar", 0, 0, 80, 20, "eighty") + text_at("label", 4, 36, "start", "80"))
#pragma once

#include <string>

namespace examples::svg {

// Text made safe inside elements and quoted attributes, of HTML too.
std::string escape(const std::string& text);

std::string pixels(double value);  // one decimal

std::string attribute(const std::string& name, const std::string& value);  // with a blank before it

// `anchor`: start, middle or end. An empty `kind` is no class.
std::string text_at(const std::string& kind, double x, double y, const std::string& anchor,
                    const std::string& text);

std::string segment(const std::string& kind, double x1, double y1, double x2, double y2);

// Shows `hint` while the pointer rests on it, unless that is empty. `more` are attributes.
std::string rectangle(const std::string& kind, double x, double y, double width, double height,
                      const std::string& hint = {}, const std::string& more = {});

// A dot that shows `hint` while the pointer rests on it.
std::string dot(const std::string& kind, double x, double y, const std::string& hint);

// A file that stands alone, no wider than its window.
std::string picture(const std::string& title, double width, double height, const std::string& content);

// Writes a picture to a file. Throws pacer::FileError where that cannot be written.
void save(const std::string& path, const std::string& picture);

}  // namespace examples::svg
