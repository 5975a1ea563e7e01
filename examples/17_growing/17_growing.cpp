// A picture, painted by spots that grow in number: a small relative of gaussian splatting. Where the picture pulls hard at
// a spot it gets a neighbour, spots that nobody sees are dropped, and now and then all have to prove themselves anew. Each
// step looks at a part of the picture and changes only the spots that reach into it. Kill it at any moment and start it
// again: it begins with as many spots as its checkpoint has, and every step has the bits it would have had, as the printed
// hash shows. What to look at: how many spots there are, and how near the painting comes to the picture.
//
//   17_growing [FOLDER]     the run's folder; run/17_growing unless given
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/files/checksum.h>
#include <pacer/pacer.h>

#include "support/command_line.h"
#include "support/program.h"

namespace {

using torch::Tensor;

constexpr int64_t kSide = 40, kRows = 20;  // of the picture, and of what a step looks at
constexpr int64_t kFirstSpots = 24, kMostSpots = 160;
constexpr int64_t kSteps = 300;
constexpr int64_t kEvery = 30, kLastChange = 240;  // when the number of spots changes
constexpr int64_t kResetEvery = 90;                // when opacity is set back
constexpr double kOpacityAfterReset = 0.15, kLeastOpacity = 0.06;

// [kSide, kSide, 3] between 0 and 1: a disc, a ring and a bar in front of a sky.
Tensor draw_picture() {
  const auto at = (torch::arange(kSide, torch::kFloat) + 0.5) / kSide;
  const auto x = at.view({1, kSide, 1}), y = at.view({kSide, 1, 1});
  const auto distance = [&](double x0, double y0) {
    return torch::sqrt((x - x0).square() + (y - y0).square());
  };
  const auto color = [](double red, double green, double blue) {
    return torch::tensor({red, green, blue}, torch::kFloat);
  };
  const auto over = [](const Tensor& below, const Tensor& where, const Tensor& paint) {
    return below + torch::sigmoid(80 * where) * (paint - below);
  };
  auto picture = 0.2 + 0.3 * y * color(0.6, 0.8, 1) + torch::zeros({1, kSide, 1});
  picture = over(picture, 0.2 - distance(0.3, 0.35), color(0.95, 0.7, 0.2));
  picture = over(picture, 0.03 - torch::abs(distance(0.68, 0.55) - 0.2), color(0.9, 0.2, 0.3));
  return over(picture, 0.05 - torch::abs(y - 0.9), color(0.1, 0.45, 0.2));
}

// Spots with a place, a size, a colour and an opacity each, and what was seen of them since their number last changed.
struct SpotsImpl : torch::nn::Module {
  explicit SpotsImpl(int64_t count) {
    register_parameter("place", torch::rand({count, 2}));
    register_parameter("size", torch::full({count, 2}, -2.2));  // logarithms, across and down
    register_parameter("color", torch::full({count, 3}, 0.5));
    pull = register_buffer("pull", torch::zeros({count}));
    seen = register_buffer("seen", torch::zeros({count}));
    register_parameter("opacity", torch::zeros({count}));  // before a sigmoid
  }

  const Tensor& get(const char* name) const { return parameters_[name]; }
  void set(const char* name, const Tensor& value) { parameters_[name] = value; }
  int64_t count() const { return get("opacity").size(0); }

  // How strongly each spot covers each of the pixels of `rows` rows from row `first` on: [spots, rows * kSide].
  Tensor cover(int64_t first, int64_t rows) const {
    const auto across = (torch::arange(kSide, torch::kFloat) + 0.5) / kSide;
    const auto down = (torch::arange(first, first + rows, torch::kFloat) + 0.5) / kSide;
    const auto size = torch::exp(get("size"));
    const auto distance = [&](int64_t axis, const Tensor& at) {
      return ((at.unsqueeze(0) - get("place").select(1, axis).unsqueeze(1)) /
              size.select(1, axis).unsqueeze(1))
          .square();
    };
    const auto both = distance(0, across).unsqueeze(1) + distance(1, down).unsqueeze(2);
    return (torch::exp(-0.5 * both) * torch::sigmoid(get("opacity")).view({-1, 1, 1})).flatten(1);
  }
  // Those rows of the painting: [rows, kSide, 3].
  Tensor paint(int64_t first, int64_t rows) const {
    return cover(first, rows).t().matmul(get("color")).view({rows, kSide, 3});
  }

  Tensor pull, seen;  // how hard their places were pulled at, in sum, and in how many steps
};
TORCH_MODULE(Spots);

// The parameters in groups, each with a rate of its own.
std::vector<pacer::NamedParamGroup> groups_of(const Spots& spots) {
  std::vector<pacer::NamedParamGroup> groups;
  for (const auto& [name, rate] : std::vector<std::pair<const char*, double>>{
           {"place", 0.004}, {"size", 0.02}, {"color", 0.01}, {"opacity", 0.05}}) {
    groups.emplace_back(pacer::NamedParameters{{name, spots->get(name)}},
                        std::make_unique<pacer::FusedAdamOptions>(rate));
  }
  return groups;
}

// Gives the spots those rows; -1 - i is a neighbour of spot i.
void select(Spots& spots, pacer::FusedOptimizer& optimizer, const Tensor& rows) {
  const torch::NoGradGuard no_grad;
  const auto is_new = rows < 0;
  const auto from = torch::where(is_new, -1 - rows, rows);
  std::vector<std::pair<Tensor, Tensor>> pairs;
  for (const char* name : {"place", "size", "color", "opacity"}) {
    const Tensor old = spots->get(name);
    Tensor now = old.index_select(0, from);
    if (name == std::string("place")) {
      now +=
          is_new.unsqueeze(1) * torch::randn_like(now) * torch::exp(spots->get("size").index_select(0, from));
    }
    // A new spot changes nothing until it is trained.
    if (name == std::string("color")) now.masked_fill_(is_new.unsqueeze(1), 0);
    pairs.emplace_back(old, now.requires_grad_());
    spots->set(name, now);
  }
  optimizer.replace(pairs, torch::where(is_new, torch::full_like(rows, -1), rows));
  spots->pull.set_data(torch::zeros({rows.size(0)}));
  spots->seen.set_data(torch::zeros({rows.size(0)}));
}

// Drops spots that cover too little, and gives those neighbours that were pulled at hardest.
void change_number(Spots& spots, pacer::FusedOptimizer& optimizer) {
  const auto visible = torch::sigmoid(spots->get("opacity").detach()) > kLeastOpacity;
  const auto kept = torch::nonzero(visible).flatten();
  const auto pull = spots->pull / spots->seen.clamp_min(1) * visible;
  const int64_t more = std::min(kMostSpots - kept.size(0), kept.size(0) / 2);
  const auto parents = std::get<1>(pull.topk(std::max<int64_t>(more, 0)));
  std::printf("%lld spots: %lld dropped, %lld more\n", static_cast<long long>(spots->count()),
              static_cast<long long>(spots->count() - kept.size(0)), static_cast<long long>(parents.size(0)));
  select(spots, optimizer, torch::cat({kept, -1 - parents}));
}

// All spots become faint, so that those which nobody needs are dropped. Their moments begin anew.
void reset_opacity(Spots& spots, pacer::FusedOptimizer& optimizer) {
  const Tensor old = spots->get("opacity");
  const double most = std::log(kOpacityAfterReset / (1 - kOpacityAfterReset));
  const Tensor now = old.detach().clamp_max(most).requires_grad_();
  spots->set("opacity", now);
  optimizer.replace({{old, now}}, torch::full({old.size(0)}, -1, torch::kLong));
}

std::string hash_of(const Spots& spots) {
  pacer::Checksum checksum;
  for (const auto& parameter : spots->parameters()) checksum.add(parameter.data_ptr(), parameter.nbytes());
  return checksum.hex();
}

void run(const std::string& folder) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const Tensor picture = draw_picture();
  const auto saved = pacer::saved_shapes(folder);  // of a run that was stopped; else empty
  Spots spots(saved.empty() ? kFirstSpots : saved.at("opacity").front());
  pacer::FusedAdam optimizer(groups_of(spots));
  pacer::Session session(spots, optimizer);
  session.use(pacer::Checkpoints(pacer::CheckpointsOptions(folder).every(3)));

  for (int64_t step = session.resume().value_or(0); step < kSteps; ++step) {
    // Changes belong here, at the head of a step: a resumed run comes by, too.
    if (step > 0 && step % kEvery == 0 && step <= kLastChange) change_number(spots, optimizer);
    if (step > 0 && step % kResetEvery == 0 && step < kLastChange) reset_opacity(spots, optimizer);

    const int64_t first = torch::randint(kSide - kRows + 1, {1}).item<int64_t>();
    const auto [wanted] = session.begin(picture.narrow(0, first, kRows));
    const auto visible = std::get<0>(spots->cover(first, kRows).detach().max(1)) > 1.0 / 255;
    optimizer.set_visible_rows(spots->parameters(), visible);
    const auto loss = torch::mse_loss(spots->paint(first, kRows), wanted);
    session.backward(loss);
    spots->pull.add_(spots->get("place").grad().norm(2, 1) * visible);
    spots->seen.add_(visible);
    session.step();
    std::printf("step %lld, weights %s\n", static_cast<long long>(session.progress().step),
                hash_of(spots).c_str());
    std::fflush(stdout);
  }
  session.finish();
  std::printf("done after step %lld, weights %s\n", static_cast<long long>(session.progress().step),
              hash_of(spots).c_str());
  const auto error = session.evaluate([&] { return torch::mse_loss(spots->paint(0, kSide), picture); });
  std::printf("%lld spots, %.1f dB\n", static_cast<long long>(spots->count()),
              -10 * std::log10(error.item<double>()));
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    auto known = examples::make_options();
    known.add_options()("folder",
                        boost::program_options::value<std::string>()->default_value("run/17_growing"),
                        "the run's folder; may be given without its name");
    const auto given = examples::read_command_line(argument_count, arguments,
                                                   "Paints a picture by spots that grow in number. Kill it "
                                                   "at any moment and start it again: it goes on with as\n"
                                                   "many spots as it had.\n",
                                                   known, "folder");
    if (given) run((*given)["folder"].as<std::string>());
    return 0;
  });
}
