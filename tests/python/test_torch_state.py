#!/usr/bin/env python3
"""What programs do to an optimizer of torch.optim beside stepping it: done to FusedAdam and FusedAdamW, it has the same effect
or is refused in one sentence, and nothing is passed over. PYTHONPATH names the package."""
import copy
import io
import re
import unittest

import torch

import pacer

MINE = {torch.optim.Adam: pacer.FusedAdam, torch.optim.AdamW: pacer.FusedAdamW}


def parameters():
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size)) for size in [(4, 3), (7,), ()]]


def train(optimizer, params, steps=range(3)):
    for step in steps:
        torch.manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()


class Case(unittest.TestCase):
    def near(self, mine, theirs):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)

    def refuses(self, error, words, work):
        with self.assertRaisesRegex(error, words) as caught:
            work()
        self.assertNotIn("\n", str(caught.exception))

    def both(self, use):
        """Calls use(kind, params) with torch's class and with ours and compares what became of the parameters."""
        for pair in MINE.items():
            ends = []
            for kind in pair:
                params = parameters()
                use(kind, params)
                ends.append(params)
            self.near(*ends)


class Effects(Case):
    def test_betas_may_be_a_list_or_tensors_that_change_in_place(self):
        def use(kind, params):
            optimizer = kind(params, betas=[0.9, 0.99])
            train(optimizer, params)
            optimizer.param_groups[0]["betas"] = betas = [0.9, 0.99]
            train(optimizer, params, range(3, 5))
            betas[0] = 0.3
            train(optimizer, params, range(5, 7))

        self.both(use)
        a, b = parameters(), parameters()
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        mine, theirs = pacer.FusedAdamW(a, betas=betas), torch.optim.AdamW(b, betas=(0.9, 0.99))
        train(mine, a)
        train(theirs, b)
        betas[0].fill_(0.25)
        theirs.param_groups[0]["betas"] = (0.25, 0.99)
        train(mine, a, range(3, 6))
        train(theirs, b, range(3, 6))
        self.near(a, b)

    def test_classes_derived_from_ours_are_optimizers_too(self):
        for kind in (*MINE.values(), pacer.FusedLamb):
            mine = type("Mine", (kind,), {})
            a, b = parameters(), parameters()
            train(mine(a), a)
            train(kind(b), b)
            for p, q in zip(a, b):
                self.assertTrue(torch.equal(p, q))

    def test_groups_of_a_torch_optimizer_are_taken_as_they_are(self):
        def use(kind, params):
            old = torch.optim.AdamW(params, lr=0.01, foreach=False)
            new = kind(old.param_groups, lr=0.5) if kind is pacer.FusedAdamW else kind(params, lr=0.01, weight_decay=1e-2)
            train(new, params)
            self.assertIn("foreach", old.param_groups[0])

        for kind in (pacer.FusedAdamW,):
            ends = [parameters(), parameters()]
            use(kind, ends[0])
            use(torch.optim.AdamW, ends[1])
            self.near(*ends)

    def test_states_of_older_versions_and_with_or_without_names_load(self):
        def use(kind, params):
            named = [(f"p{i}", p) for i, p in enumerate(params)]
            for first, second in [(params, named), (named, params)]:
                old = kind(first, lr=0.01)
                train(old, params)
                state = old.state_dict()
                for fields in state["state"].values():
                    fields["step"] = fields["step"].item()
                state["param_groups"][0].pop("amsgrad")
                new = kind(second, lr=0.5)
                new.load_state_dict(state)
                self.assertEqual(new.param_groups[0].get("param_names"), ["p0", "p1", "p2"])
                train(new, params, range(3, 6))

        self.both(use)

    def test_what_is_saved_loads_with_weights_only_and_is_not_changed_by_loading(self):
        def use(kind, params):
            optimizer = kind(params)
            train(optimizer, params)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            before = copy.deepcopy(state)
            other = kind(params)
            other.load_state_dict(state)
            if kind in MINE.values():  # torch's goes on with the tensors that it was given
                train(other, params, range(3, 6))
            torch.testing.assert_close(state["state"], before["state"], rtol=0, atol=0)
            self.assertEqual(state["param_groups"], before["param_groups"])
            if kind not in MINE.values():
                train(other, params, range(3, 6))

        self.both(use)

    def test_a_copy_has_the_public_attributes_and_repr_shows_torchs_options(self):
        public = lambda optimizer: {name for name in vars(optimizer) if not name.startswith("_")}
        for theirs, mine in MINE.items():
            optimizer = mine(parameters(), lr=0.25)
            self.assertEqual(public(optimizer), public(copy.deepcopy(optimizer)))
            self.assertEqual(public(optimizer), public(theirs(parameters())))
            lines = repr(optimizer).splitlines()
            for name in ("lr: 0.25", "betas: (0.9, 0.999)", "eps: 1e-08", "amsgrad: False"):
                self.assertIn(f"    {name}", lines)
                self.assertIn(f"    {name}", repr(theirs(parameters(), lr=0.25)).splitlines())

    def test_gradients_of_zero_and_none_are_not_the_same(self):
        def use(kind, params):
            optimizer = kind(params, lr=0.1)
            train(optimizer, params)
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()

        self.both(use)

    def test_a_grad_scaler_goes_through_overflows_as_with_torch(self):
        def use(kind, params):
            optimizer, scaler = kind(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            for step in range(6):
                optimizer.zero_grad()
                scaler.scale(sum((p**2).sum() for p in params)).backward()
                if step == 3:
                    params[1].grad[2] = float("nan")
                if step % 2:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(params, 0.5)
                scaler.step(optimizer)
                scaler.update()
            self.assertEqual(scaler.get_scale(), 16.0)

        self.both(use)


class Refusals(Case):
    def test_options_of_torch_alone_are_refused_wherever_they_are_put(self):
        for mine in MINE.values():
            for name in ("maximize", "differentiable"):
                self.refuses(ValueError, f'no option "{name}"', lambda: mine([{"params": parameters(), name: True}]))
                mine([{"params": parameters(), name: False}])
                params = parameters()
                optimizer = mine(params)
                optimizer.param_groups[0][name] = True
                self.refuses(ValueError, f'no option "{name}"', lambda: train(optimizer, params))
        decoupled = torch.optim.AdamW(parameters(), weight_decay=0.1).state_dict()
        self.refuses(ValueError, "use FusedAdamW", lambda: pacer.FusedAdam(parameters()).load_state_dict(decoupled))

    def test_values_that_are_no_numbers_are_refused(self):
        for mine in (*MINE.values(), pacer.FusedLamb):
            for name in ("lr", "eps", "weight_decay", "bias_correction", "seed"):
                for value in ("1e-4", None, [1.0]):
                    with self.subTest(mine.__name__, **{name: value}):
                        self.refuses(TypeError, f"{name} is .*, but must be a number", lambda: mine(parameters(), **{name: value}))
            for options, error in [
                ({"betas": (0.9,)}, ValueError), ({"betas": 0.9}, ValueError), ({"betas": ("0.9", 0.99)}, TypeError),
                ({"eps": torch.tensor(1e-8)}, TypeError), ({"master_weights": 1}, TypeError), ({"rounding": None}, TypeError),
                ({"seed": 1.5}, ValueError), ({"lr": torch.ones(2)}, ValueError), ({"lr": float("nan")}, ValueError),
            ]:  # fmt: skip
                with self.subTest(mine.__name__, **options):
                    self.refuses(error, "", lambda: mine(parameters(), **options))
            params = parameters()
            optimizer = mine(params)
            optimizer.param_groups[0]["weight_decay"] = "0.1"
            self.refuses(TypeError, "weight_decay is '0.1', but must be a number", lambda: train(optimizer, params))

    def test_parameters_and_groups_put_in_by_hand_are_refused(self):
        for mine in MINE.values():
            params = parameters()
            optimizer = mine(params)
            train(optimizer, params)
            state = optimizer.state_dict()["state"]
            optimizer.param_groups.append({"params": parameters()})
            self.assertEqual(optimizer.state_dict()["state"].keys(), state.keys())
            self.refuses(ValueError, "use add_param_group", optimizer.step)
            optimizer.param_groups.pop()
            optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.zeros(7))
            self.refuses(ValueError, "other parameters were put into group 0", optimizer.step)
            optimizer.param_groups[0]["params"] = params[:2]
            self.refuses(ValueError, "other parameters were put into group 0", optimizer.step)
            with self.assertRaisesRegex(ValueError, "use load_state_dict"):
                optimizer.state = {}
            optimizer.param_groups[0]["params"] = list(params)
            train(optimizer, params)

    def test_state_of_another_rule_is_refused(self):
        decay = {"weight_decay": 0.3}
        l2, decoupled = (pacer.FusedAdam, torch.optim.Adam), (pacer.FusedAdamW, torch.optim.AdamW)
        for savers, loader, other in ((decoupled, pacer.FusedAdam, "FusedAdamW"), (l2, pacer.FusedAdamW, "FusedAdam")):
            for saver in savers:
                with self.subTest(saver=saver.__module__ + saver.__name__):
                    params = parameters()
                    source = saver(params, **decay)
                    train(source, params)
                    target = loader(parameters(), **decay)
                    self.refuses(ValueError, f"use {other}", lambda: target.load_state_dict(source.state_dict()))
        params = parameters()
        lamb, adamw = pacer.FusedLamb(params), pacer.FusedAdamW(params)
        train(lamb, params)
        train(adamw, params)
        self.refuses(ValueError, '"min_coeff", so another optimizer', lambda: adamw.load_state_dict(lamb.state_dict()))
        self.refuses(ValueError, '"amsgrad", so another optimizer', lambda: lamb.load_state_dict(adamw.state_dict()))

    def test_names_decide_which_parameter_gets_which_state(self):
        for mine in (*MINE.values(), pacer.FusedLamb):
            values = {name: torch.nn.Parameter(torch.full((3,), 1.0)) for name in "abc"}
            source = mine(list(values.items()))
            for step in range(2):
                for i, parameter in enumerate(values.values()):
                    parameter.grad = torch.full((3,), float(i + step + 1))
                source.step()
            saved = copy.deepcopy(source.state_dict())
            target = mine([(name, values[name]) for name in "cab"])
            target.load_state_dict(saved)
            for parameter in values.values():
                self.assertTrue(torch.equal(target.state[parameter]["exp_avg"], source.state[parameter]["exp_avg"]))
            self.assertEqual(target.param_groups[0]["param_names"], list("cab"))
            renamed = mine([(f"net.{name}", values[name]) for name in "abc"])
            self.refuses(ValueError, 'no parameter "net.a"', lambda: renamed.load_state_dict(saved))
            unnamed = mine([values[name] for name in "abc"])
            unnamed.load_state_dict(saved)
            self.assertTrue(torch.equal(unnamed.state[values["c"]]["exp_avg"], source.state[values["c"]]["exp_avg"]))

    def test_state_of_another_optimizer_is_refused_and_changes_nothing(self):
        for mine in MINE.values():
            a, b = parameters(), parameters()
            optimizer, twin = mine(a), mine(b)
            train(optimizer, a)
            train(twin, b)
            good = copy.deepcopy(optimizer.state_dict())
            for others in (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad):
                params = parameters()
                other = others(params, 0.1, **({"momentum": 0.9} if others is torch.optim.SGD else {}))
                train(other, params)
                words = "another optimizer saved it" if others is torch.optim.SGD else "of an optimizer of this class"
                self.refuses(ValueError, words, lambda: optimizer.load_state_dict(other.state_dict()))
            bad = copy.deepcopy(good)
            bad["state"][0]["exp_avg"] = torch.zeros(5)
            self.refuses(ValueError, re.escape('"exp_avg" of the state to load is of shape (5,)'), lambda: optimizer.load_state_dict(bad))
            bad = copy.deepcopy(good)
            bad["param_groups"][0]["params"].pop()
            self.refuses(ValueError, "doesn't match the size", lambda: optimizer.load_state_dict(bad))
            train(optimizer, a, range(3, 5))
            train(twin, b, range(3, 5))
            for p, q in zip(a, b):
                self.assertTrue(torch.equal(p, q))

    def test_complex_sparse_and_foreign_tensors_are_refused_in_one_sentence(self):
        for mine in (*MINE.values(), pacer.FusedLamb):
            for values in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")):
                self.refuses(ValueError, "", lambda: mine([torch.nn.Parameter(values)]))
            weight = torch.nn.Parameter(torch.zeros(4))
            optimizer = mine([weight])
            weight.grad = torch.zeros(4).to_sparse()
            self.refuses(RuntimeError, "[Ss]parse", optimizer.step)


if __name__ == "__main__":
    unittest.main()
