#!/usr/bin/env python3
"""Parameters that grow and shrink by rows, and steps over some of the rows: beside torch's Adam with surgery by hand."""
import copy
import pickle
import unittest

import torch

import pacer


def parameters():
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size)) for size in [(6, 3), (6,), (5, 2)]]


def train(optimizer, params, seed):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()


def rows_of(tensor, rows):
    """Those rows of it; zeros where the number is -1."""
    chosen = tensor.index_select(0, rows.clamp(min=0))
    return chosen * (rows >= 0).to(tensor.dtype).reshape(-1, *[1] * (tensor.dim() - 1))


def operate(optimizer, params, rows):
    """What a program does to torch's Adam: the first two parameters get those rows."""
    for i, old in enumerate(params[:2]):
        new = torch.nn.Parameter(rows_of(old.detach(), rows))
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            name: rows_of(value, rows) if name != "step" else value for name, value in state.items()
        }
        optimizer.param_groups[0]["params"][i] = params[i] = new


class Replace(unittest.TestCase):
    def test_state_follows_the_rows_as_by_hand(self):
        mine_of, theirs_of = parameters(), parameters()
        mine, theirs = pacer.FusedAdam(mine_of, lr=0.1), torch.optim.Adam(theirs_of, lr=0.1)
        for round_number, rows in enumerate(([0, 2, -1, 5, 5, -1, 1], [3, 0, 6])):
            for seed in range(3):
                train(mine, mine_of, 10 * round_number + seed)
                train(theirs, theirs_of, 10 * round_number + seed)
            rows = torch.tensor(rows)
            before, replaced = mine_of[:2], [torch.nn.Parameter(rows_of(p.detach(), rows)) for p in mine_of[:2]]
            mine.state  # what was read before is forgotten
            mine.replace(zip(before, replaced), rows)
            mine_of[:2] = replaced
            operate(theirs, theirs_of, rows)
            self.assertTrue(all(a is b for a, b in zip(mine.param_groups[0]["params"], mine_of, strict=True)))
            self.assertEqual(set(map(id, mine.state)), set(map(id, mine_of)))
            for a, b in zip(mine_of, theirs_of, strict=True):
                for name in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(mine.state[a][name], theirs.state[b][name], rtol=2e-5, atol=2e-6)
        for seed in range(3):
            train(mine, mine_of, 50 + seed)
            train(theirs, theirs_of, 50 + seed)
        for a, b in zip(mine_of, theirs_of, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)

    def test_names_stay_and_a_state_dict_goes_on_to_the_bit(self):
        model = torch.nn.ParameterDict({"a": parameters()[0], "b": parameters()[1]})
        optimizer = pacer.FusedAdamW(model.named_parameters(), lr=0.1)
        train(optimizer, model.values(), 1)
        rows = torch.tensor([1, -1])
        fresh = torch.nn.Parameter(torch.ones(2, 3))
        optimizer.replace([(model["a"], fresh)], rows)
        model["a"] = fresh
        self.assertEqual(optimizer.param_groups[0]["param_names"], ["a", "b"])
        copied = copy.deepcopy(model)
        other = pacer.FusedAdamW(copied.named_parameters(), lr=0.5)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, model.values(), 2)
        train(other, copied.values(), 2)
        self.assertTrue(all(map(torch.equal, model.values(), copied.values())))

    def test_rows_are_appended_in_place_and_state_follows_as_by_hand(self):
        mine_of, theirs_of = parameters(), parameters()
        mine, theirs = pacer.FusedAdam(mine_of, lr=0.1), torch.optim.Adam(theirs_of, lr=0.1)
        module = torch.nn.Module()
        module.a = mine_of[0]
        addresses = []
        for round_number in range(4):  # 6, 8, 10, 12 rows in memory for 12, and then 14
            for seed in range(3):
                train(mine, mine_of, 10 * round_number + seed)
                train(theirs, theirs_of, 10 * round_number + seed)
            more = [torch.zeros(2, *p.shape[1:]) for p in mine_of[:2]]
            mine_of[:2] = mine.append_rows(zip(mine_of[:2], more))
            module.a = mine_of[0]
            self.assertIs(module.a, mine.param_groups[0]["params"][0])
            self.assertTrue(module.a.is_leaf and module.a.requires_grad)
            self.assertEqual(list(module.parameters())[0].shape, (8 + 2 * round_number, 3))
            addresses.append((module.a.data_ptr(), mine.state[module.a]["exp_avg"].data_ptr()))
            operate(theirs, theirs_of, torch.tensor([*range(6 + 2 * round_number), -1, -1]))
            for a, b in zip(mine_of, theirs_of, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
                torch.testing.assert_close(mine.state[a]["exp_avg"], theirs.state[b]["exp_avg"], rtol=2e-5, atol=2e-6)
        self.assertEqual(len(set(addresses[:3])), 1)
        self.assertNotEqual(addresses[3], addresses[2])
        copied = copy.deepcopy(module)
        self.assertEqual([name for name, _ in copied.named_parameters()], ["a"])
        with self.assertRaisesRegex(ValueError, "takes rows like its own"):
            mine.append_rows([(mine_of[0], torch.zeros(2, 4))])
        self.assertIs(mine.param_groups[0]["params"][0], module.a)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self):
        params = parameters()
        optimizer = pacer.FusedAdam(params, lr=0.1)
        train(optimizer, params, 1)
        before = copy.deepcopy(optimizer.state_dict())
        rows = torch.tensor([0, 1])
        good = torch.nn.Parameter(torch.ones(2, 3))
        for pairs, which, message in (
            ([(params[0], torch.ones(2, 3))], rows, "needs a gradient"),
            ([(params[0], good), (params[1], torch.nn.Parameter(torch.ones(3)))], rows, "with 2 rows"),
            ([(params[0], good)], torch.tensor([0, 6]), "which has 6"),
            ([(params[0], good)], torch.tensor([0.0, 1.0]), "vector of integers"),
            ([(torch.ones(2), good)], rows, "not one of its parameters"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                optimizer.replace(pairs, which)
        self.assertTrue(all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True)))
        for key, state in optimizer.state_dict()["state"].items():
            self.assertTrue(all(torch.equal(value, before["state"][key][name]) for name, value in state.items()))
        with self.assertRaisesRegex(ValueError, "not for 1-bit optimizers"):
            pacer.OneBitAdam([params[0]], lr=0.1, freeze_step=9).replace([(params[0], good)], rows)


class VisibleRows(unittest.TestCase):
    def test_hidden_rows_stay_as_they_are_and_masks_may_be_written_to(self):
        params, whole = parameters(), parameters()
        mine, all_rows = pacer.FusedAdam(params, lr=0.1), pacer.FusedAdam(whole, lr=0.1)
        visible = torch.tensor([True, False, True, False, False, True])
        mine.set_visible_rows(params[:2], visible)
        for seed in range(4):
            visible.copy_(torch.rand(6) < 0.5)
            # What all of it would do, with hidden rows put back by hand.
            kept = [[t.clone() for t in (p.data, *self.moments(all_rows, p))] for p in whole[:2]]
            train(mine, params, seed)
            train(all_rows, whole, seed)
            for p, before in zip(whole[:2], kept):
                for now, then in zip((p.data, *self.moments(all_rows, p)), before or ()):
                    now[~visible] = then[~visible]
            for a, b in zip(params, whole, strict=True):
                self.assertTrue(torch.equal(a, b))
        mine.set_visible_rows(params[:2], None)
        train(mine, params, 9)
        train(all_rows, whole, 9)
        self.assertTrue(all(map(torch.equal, params, whole)))

    @staticmethod
    def moments(optimizer, parameter):
        state = optimizer.state.get(parameter)
        return (state["exp_avg"], state["exp_avg_sq"]) if state else (torch.zeros_like(parameter),) * 2

    def test_copies_and_loads_have_the_masks(self):
        params = parameters()
        optimizer = pacer.FusedAdamW(params, lr=0.1)
        optimizer.set_visible_rows(params[:1], torch.tensor([True, False] * 3))
        train(optimizer, params, 1)
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in (optimizer, *copies):
            own = each.param_groups[0]["params"]
            before = own[0].detach().clone()
            train(each, own, 2)
            self.assertEqual((own[0] != before).any(1).tolist(), [True, False] * 3)
            each.set_visible_rows(own[:1], None)
            before = own[0].detach().clone()
            train(each, own, 3)
            self.assertTrue((own[0] != before).any(1).all())

    def test_a_replaced_parameter_has_no_mask(self):
        params = parameters()
        optimizer = pacer.FusedAdam(params, lr=0.1)
        optimizer.set_visible_rows(params[:1], torch.tensor([True, False] * 3))
        fresh = torch.nn.Parameter(torch.ones(2, 3))
        optimizer.replace([(params[0], fresh)], torch.tensor([0, 1]))
        train(optimizer, [fresh, *params[1:]], 1)
        self.assertTrue((fresh != 1).all())
        train(copy.deepcopy(optimizer), [], 1)

    def test_what_does_not_fit_is_refused(self):
        params = parameters()
        optimizer = pacer.FusedAdam(params, lr=0.1)
        for chosen, visible, message in (
            (params[:1], torch.ones(5, dtype=torch.bool), "has 6 rows"),
            (params[:1], torch.ones(6), "vector of Bool"),
            ([torch.ones(6)], torch.ones(6, dtype=torch.bool), "not one of its parameters"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                optimizer.set_visible_rows(chosen, visible)
        with self.assertRaisesRegex(ValueError, "use FusedAdam"):
            pacer.FusedLamb(params, lr=0.1).set_visible_rows(params[:1], torch.ones(6, dtype=torch.bool))


if __name__ == "__main__":
    unittest.main()
