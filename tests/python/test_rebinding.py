"""What torch's ways to copy, move, resize, rebind and share a tensor do to its block in the pool.

That an alias made by such a way keeps the block, and that the last one gives it back, is in test_aliases.py.
"""

import copy
import io
import pickle
import weakref

import pytest
import torch

import pinpool.torch

COUNT = 5000
NBYTES = 4 * COUNT
UNRESIZABLE = "storage that is not resizable"
POOLS_THINGS = {
    "pool": lambda pool: pool,
    "array": lambda pool: pool.empty(COUNT),
    "registration": lambda pool: pool.register(bytearray(COUNT)),
}


@pytest.fixture(params=["exchange API", "capsule"])
def make(request, pool):
    """Make a tensor of sevens in the pool."""
    route = pinpool.torch.empty if request.param == "exchange API" else pinpool.torch._tensors._empty_by_capsule

    def make(*shape):
        tensor = route(pool, shape or COUNT, torch.float32)
        assert pinpool.torch.is_pinned(tensor)
        return tensor.fill_(7)

    return make


@pytest.fixture
def blocks(pool):
    return lambda: pool.stats()["blocks"]


@pytest.fixture(params=[False, True], ids=["data is assigned", "parameters are swapped"])
def swapped(request):
    """Tell whether modules convert and load by `swap_tensors`, which they do not by default."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def ordinary_linear():
    return torch.nn.Linear(COUNT // 2, 2, bias=False)


def linear(make):
    module = ordinary_linear()
    module.weight = torch.nn.Parameter(make(2, COUNT // 2))
    return module


def ones():
    return {"weight": torch.ones(2, COUNT // 2)}


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


# Another tensor, from one that stays as it is

SAME_MEMORY = {
    "copy.copy": copy.copy,
    "contiguous": lambda t: t.contiguous(),
    "cpu": lambda t: t.cpu(),
    "to its own dtype": lambda t: t.to(torch.float32),
    "storage.cpu": lambda t: torch.empty(0).set_(t.untyped_storage().cpu()),
    "deepcopy with it in the memo": lambda t: copy.deepcopy(t, {id(t): t}),
}

A_COPY = {
    "copy.deepcopy": copy.deepcopy,
    "deepcopy of its storage": lambda t: torch.empty(0).set_(copy.deepcopy(t.untyped_storage())),
    "deepcopy of a Parameter": lambda t: copy.deepcopy(torch.nn.Parameter(t)),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle of a Parameter": lambda t: pickle.loads(pickle.dumps(torch.nn.Parameter(t))),
    "torch.save": saved_and_loaded,
    "clone": lambda t: t.clone(),
    "storage.clone": lambda t: torch.empty(0).set_(t.untyped_storage().clone()),
    "to with copy": lambda t: t.to(torch.float32, copy=True),
    "to another dtype": lambda t: t.to(torch.float64),
    "torch.tensor": lambda t: torch.tensor(t.tolist()),
    "arithmetic": lambda t: t + 0,
}


@pytest.mark.parametrize("name", SAME_MEMORY)
def test_what_needs_no_copy_is_the_same_memory(make, blocks, name):
    tensor = make()
    other = SAME_MEMORY[name](tensor)
    assert other.data_ptr() == tensor.data_ptr()
    del tensor
    assert (blocks(), pinpool.torch.is_pinned(other)) == (1, True)
    del other
    assert blocks() == 0


@pytest.mark.parametrize("name", A_COPY)
def test_a_copy_that_torch_makes_is_not_in_the_pool_and_leaves_the_block_to_the_original(make, blocks, name):
    tensor = make()
    other = A_COPY[name](tensor)
    assert not pinpool.torch.is_pinned(other)
    assert (blocks(), pinpool.torch.is_pinned(tensor)) == (1, True)
    del tensor
    assert blocks() == 0
    assert other.tolist() == [7] * COUNT


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", POOLS_THINGS)
def test_what_owns_memory_is_not_copied_and_not_pickled(pool, thing, duplicate):
    owner = POOLS_THINGS[thing](pool)
    before = pool.stats()
    with pytest.raises(TypeError, match="cannot pickle"):
        duplicate(owner)
    assert pool.stats() == before


# Other memory for the same tensor

REPLACEMENTS = {
    "data": lambda t: setattr(t, "data", torch.ones(3)),
    "data of another dtype": lambda t: setattr(t, "data", torch.ones(3, dtype=torch.float16)),
    "set_ to nothing": lambda t: t.set_(),
    "set_": lambda t: t.set_(torch.ones(3)),
    "set_ to a storage": lambda t: t.set_(torch.ones(3).untyped_storage()),
    "swap_tensors": lambda t: torch.utils.swap_tensors(t, torch.ones(3)),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_tensor_that_gets_other_memory_gives_its_block_back_at_once(make, blocks, name):
    tensor = make()
    REPLACEMENTS[name](tensor)
    assert (blocks(), pinpool.torch.is_pinned(tensor)) == (0, False)


@pytest.mark.parametrize("name", REPLACEMENTS)
@pytest.mark.parametrize("alias_of", [torch.Tensor.detach, torch.Tensor.numpy, torch.Tensor.untyped_storage])
def test_an_alias_of_a_tensor_that_gets_other_memory_keeps_the_block(make, blocks, name, alias_of):
    tensor = make()
    address = tensor.data_ptr()
    alias = alias_of(tensor.detach())
    REPLACEMENTS[name](tensor)
    assert blocks() == 1
    assert pinpool.is_pinned((address, NBYTES))
    del alias
    assert blocks() == 0


REFUSED = {
    "set_ of another dtype": lambda t: t.set_(torch.ones(3, dtype=torch.float16)),
    "data of another device": lambda t: setattr(t, "data", torch.ones(3, device="meta")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_torch_refuses_changes_nothing(make, blocks, name):
    tensor = make()
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match=r"Could not set|incompatible tensor type"):
        REFUSED[name](tensor)
    assert (tensor.data_ptr(), tensor.shape, blocks()) == (address, (COUNT,), 1)


def test_data_from_the_pool_gives_back_the_block_that_it_replaces(make, blocks):
    tensor = make()
    tensor.data = make(COUNT + 1)
    assert (tensor.shape, blocks(), pinpool.torch.is_pinned(tensor)) == ((COUNT + 1,), 1, True)


def test_data_that_is_a_part_of_itself_keeps_the_whole_block(pool, make):
    tensor = make()
    address = tensor.data_ptr()
    tensor.data = tensor.data[10:20]
    assert (tensor.data_ptr(), pool.stats()["requested_bytes"]) == (address + 40, NBYTES)


def test_a_parameter_can_go_to_other_memory_and_back_any_number_of_times(make, blocks):
    home = make()
    parameter = torch.nn.Parameter(home)
    for _ in range(3):
        parameter.data = parameter.data.clone()
        assert (blocks(), pinpool.torch.is_pinned(parameter)) == (1, False)
        parameter.data = home
        assert (blocks(), parameter.data_ptr()) == (1, home.data_ptr())
    del home, parameter
    assert blocks() == 0


def test_swapped_tensors_of_one_pool_swap_their_blocks(make, blocks):
    a, b = make(), make(100)
    of_a, of_b = a.data_ptr(), b.data_ptr()
    torch.utils.swap_tensors(a, b)
    assert (a.data_ptr(), a.shape, b.data_ptr(), b.shape) == (of_b, (100,), of_a, (COUNT,))
    assert blocks() == 2
    del b
    assert (blocks(), pinpool.is_pinned((of_b, 400))) == (1, True)


@pytest.mark.parametrize("hold", [weakref.ref, lambda t: t[10:]], ids=["weak reference", "view"])
def test_a_tensor_that_something_else_refers_to_is_not_swapped(make, blocks, hold):
    tensor, other = make(), torch.ones(3)
    held = hold(tensor)
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match=r"weakref|use_count|gradient edge"):
        torch.utils.swap_tensors(tensor, other)
    assert (tensor.data_ptr(), other.tolist(), blocks()) == (address, [1] * 3, 1)
    del held
    torch.utils.swap_tensors(tensor, other)
    assert (other.data_ptr(), tensor.tolist(), blocks()) == (address, [1] * 3, 1)


def test_what_backward_saved_of_a_leaf_becomes_the_new_data_and_keeps_no_block(make, blocks):
    weight = make()
    factor = torch.ones(COUNT, requires_grad=True)
    loss = (weight * factor).sum()
    weight.data = torch.full((COUNT,), 5.0)
    assert blocks() == 0
    loss.backward()
    assert factor.grad.tolist() == [5] * COUNT


# Sizes


@pytest.mark.parametrize("shape", [(10,), (0,), (50, 100), (COUNT,)])
def test_a_tensor_resized_within_its_size_stays_where_it_is_and_keeps_the_whole_block(pool, make, shape):
    tensor = make()
    address, storage = tensor.data_ptr(), tensor.untyped_storage()
    tensor.resize_(shape)
    assert (tensor.shape, storage.data_ptr(), pool.stats()["requested_bytes"]) == (shape, address, NBYTES)
    assert tensor.resize_(COUNT).tolist() == [7] * COUNT


GROWTHS = {
    "resize_": lambda t: t.resize_(1 << 20),
    "resize_as_": lambda t: t.resize_as_(torch.empty(1 << 20)),
    "out=": lambda t: torch.add(torch.ones(1 << 20), 1, out=t.resize_(0)),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_a_tensor_that_failed_to_grow_has_the_new_shape_on_the_old_block_and_can_be_resized_back(make, blocks, name):
    tensor = make()
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match=UNRESIZABLE):
        GROWTHS[name](tensor)
    assert (tensor.shape, tensor.data_ptr(), tensor.untyped_storage().nbytes()) == ((1 << 20,), address, NBYTES)
    assert (blocks(), pinpool.torch.is_pinned(tensor)) == (1, False)
    tensor.resize_(COUNT)
    assert (tensor.tolist(), pinpool.torch.is_pinned(tensor)) == ([7] * COUNT, True)


@pytest.mark.parametrize("nbytes", [0, NBYTES // 2, NBYTES, 2 * NBYTES])
def test_a_storage_cannot_be_resized_and_is_as_it_was(make, blocks, nbytes):
    tensor = make()
    with pytest.raises(RuntimeError, match=UNRESIZABLE):
        tensor.untyped_storage().resize_(nbytes)
    assert (tensor.untyped_storage().nbytes(), tensor.tolist(), blocks()) == (NBYTES, [7] * COUNT, 1)


# Other processes

SHARE = {
    "tensor": lambda t: t.share_memory_(),
    "storage": lambda t: t.untyped_storage().share_memory_(),
    "module": lambda t: torch.nn.ParameterList([t]).share_memory(),
}


@pytest.mark.parametrize("name", SHARE)
def test_sharing_moves_a_tensor_and_its_views_out_of_the_pool_and_gives_the_block_back(make, blocks, name):
    tensor = torch.nn.Parameter(make())
    view = tensor.detach()[10:]
    SHARE[name](tensor)
    assert tensor.is_shared()
    assert view.data_ptr() == tensor.data_ptr() + 40
    assert (blocks(), pinpool.torch.is_pinned(tensor), pinpool.torch.is_pinned(view)) == (0, False, False)
    assert tensor.tolist() == [7] * COUNT


@pytest.mark.parametrize("alias_of", [torch.Tensor.numpy, torch.from_dlpack])
def test_sharing_takes_the_memory_from_arrays_on_a_tensor_as_from_those_on_any_other(make, blocks, alias_of):
    tensor = make()
    address = tensor.data_ptr()
    alias = alias_of(tensor)
    tensor.share_memory_()
    assert blocks() == 0  # torch has freed the block: `alias` must not be touched any more
    assert (alias.ctypes.data if alias_of is torch.Tensor.numpy else alias.data_ptr()) == address


def test_a_tensor_that_is_asked_whether_it_is_shared_is_not_and_stays_in_the_pool(make, blocks):
    tensor = make()
    assert not tensor.is_shared()
    assert not tensor.untyped_storage().is_shared()
    assert (blocks(), pinpool.torch.is_pinned(tensor)) == (1, True)
    del tensor
    assert blocks() == 0


def test_a_tensor_sent_through_a_queue_is_moved_out_of_the_pool_and_shared(run):
    run("""
        import torch, torch.multiprocessing, pinpool.torch
        from pinpool import PinnedPool

        def add_one(queue):
            tensor = queue.get(timeout=20)
            tensor += 1

        context = torch.multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=add_one, args=(queue,))
        child.start()
        pool = PinnedPool("host", max_bytes=MIB)
        tensor = pinpool.torch.empty(pool, 5000, torch.float32).fill_(7)
        queue.put(tensor)
        child.join(timeout=60)
        assert child.exitcode == 0
        assert (pool.stats()["blocks"], pinpool.torch.is_pinned(tensor), tensor.is_shared()) == (0, False, True)
        assert tensor.tolist() == [8] * 5000
    """)


# Inference mode


@pytest.fixture
def inference_tensor(make):
    def make_inside():
        with torch.inference_mode():
            return make()

    return make_inside


REFUSED_OUTSIDE = {
    "Parameter": torch.nn.Parameter,
    "Parameter of detach": lambda t: torch.nn.Parameter(t.detach()),
    "saved for backward": lambda t: t * torch.ones(COUNT, requires_grad=True),
}
# What the tensor and the pool are after each.
DONE_WITH_AN_ERROR = {
    "add_": (lambda t: t.add_(1), [8] * COUNT, 1),
    "resize_": (lambda t: t.resize_(3), [7] * 3, 1),
    "set_": (lambda t: t.set_(torch.ones(3)), [1] * 3, 0),
}


@pytest.mark.parametrize("name", REFUSED_OUTSIDE)
def test_an_inference_tensor_outside_of_the_mode_takes_no_part_in_autograd_and_is_as_it_was(
    inference_tensor, blocks, name
):
    tensor = inference_tensor()
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        REFUSED_OUTSIDE[name](tensor)
    assert (tensor.tolist(), blocks(), pinpool.torch.is_pinned(tensor)) == ([7] * COUNT, 1, True)
    del tensor
    assert blocks() == 0


@pytest.mark.parametrize("name", DONE_WITH_AN_ERROR)
def test_torch_updates_an_inference_tensor_outside_of_the_mode_and_then_says_that_it_may_not(
    inference_tensor, blocks, name
):
    update, values, left = DONE_WITH_AN_ERROR[name]
    tensor = inference_tensor()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        update(tensor)
    assert (tensor.tolist(), blocks()) == (values, left)


def test_an_inference_tensor_can_be_given_up_outside_of_the_mode(inference_tensor, blocks):
    tensor = inference_tensor()
    tensor.data = torch.ones(3)
    assert blocks() == 0


@pytest.mark.parametrize("alias_of", [torch.from_dlpack, lambda t: torch.from_numpy(t.numpy())])
def test_an_inference_tensor_becomes_an_ordinary_one_on_the_same_block_by_dlpack_or_numpy(
    inference_tensor, blocks, alias_of
):
    tensor = inference_tensor()
    parameter = torch.nn.Parameter(alias_of(tensor))
    assert (parameter.is_inference(), parameter.data_ptr()) == (False, tensor.data_ptr())
    del tensor
    assert (blocks(), pinpool.torch.is_pinned(parameter)) == (1, True)
    del parameter
    assert blocks() == 0


def test_a_tensor_from_outside_can_be_written_and_rebound_in_inference_mode(make, blocks):
    tensor = make()
    with torch.inference_mode():
        tensor += 1
        view = tensor.view(50, 100)
        tensor.data = torch.ones(3)
    assert (view.is_inference(), view[-1, -1].item(), blocks()) == (False, 8, 1)
    del view
    assert blocks() == 0


# Modules


def test_an_optimizer_updates_a_parameter_in_place_and_has_its_own_state_elsewhere(make, blocks):
    parameter = torch.nn.Parameter(make())
    address = parameter.data_ptr()
    optimizer = torch.optim.SGD([parameter], lr=1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    assert (parameter.tolist(), parameter.data_ptr(), blocks()) == ([6] * COUNT, address, 1)
    assert not pinpool.torch.is_pinned(parameter.grad)
    assert not pinpool.torch.is_pinned(optimizer.state[parameter]["momentum_buffer"])
    del parameter
    assert blocks() == 1
    del optimizer
    assert blocks() == 0


def test_a_gradient_in_the_pool_is_added_to_in_place_until_it_is_dropped(make, blocks):
    parameter = torch.nn.Parameter(torch.ones(COUNT))
    parameter.grad = make()
    address = parameter.grad.data_ptr()
    (2 * parameter).sum().backward()
    assert (parameter.grad.tolist(), parameter.grad.data_ptr(), blocks()) == ([9] * COUNT, address, 1)
    torch.optim.SGD([parameter]).zero_grad()
    assert (parameter.grad, blocks()) == (None, 0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_the_copy_of_a_module_is_not_in_the_pool(make, blocks, duplicate):
    module = linear(make)
    other = duplicate(module)
    assert torch.equal(other.weight, module.weight)
    assert (blocks(), pinpool.torch.is_pinned(module.weight), pinpool.torch.is_pinned(other.weight)) == (1, True, False)
    del module
    assert blocks() == 0


def test_a_shallow_copy_of_a_module_has_the_same_parameters(make, blocks):
    module = linear(make)
    other = copy.copy(module)
    assert other.weight is module.weight
    del module
    assert blocks() == 1


def test_loading_a_state_dict_copies_into_the_block(swapped, make, blocks):
    module = linear(make)
    weight, address = module.weight, module.weight.data_ptr()
    module.load_state_dict(ones())
    assert module.weight is weight
    assert (weight.data_ptr(), blocks(), weight[1, -1].item()) == (address, 1, 1)


def test_loading_a_state_dict_in_the_pool_copies_out_of_it(swapped, make, blocks):
    module = ordinary_linear()
    module.load_state_dict({"weight": make(2, COUNT // 2)})
    assert (blocks(), pinpool.torch.is_pinned(module.weight), module.weight[1, -1].item()) == (0, False, 7)


def test_assigning_a_state_dict_in_the_pool_takes_its_memory(swapped, make, blocks):
    module = ordinary_linear()
    weights = make(2, COUNT // 2)
    module.load_state_dict({"weight": weights}, assign=True)
    assert module.weight.data_ptr() == weights.data_ptr()
    del weights
    assert (blocks(), pinpool.torch.is_pinned(module.weight)) == (1, True)


def test_assigning_another_state_dict_gives_the_block_back_unless_somebody_has_the_old_parameter(swapped, make, blocks):
    module = linear(make)
    weight = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=1)
    module.load_state_dict(ones(), assign=True)
    assert (module.weight is weight, pinpool.torch.is_pinned(module.weight)) == (swapped, False)
    assert blocks() == (0 if swapped else 1)
    del optimizer, weight
    assert blocks() == 0


CONVERSIONS = {
    "dtype": lambda module: module.to(torch.float16),
    "meta": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_converting_a_module_gives_the_block_back(swapped, make, blocks, name):
    module = linear(make)
    CONVERSIONS[name](module)
    assert (blocks(), pinpool.torch.is_pinned(module.weight)) == (0, False)


def test_converting_a_module_to_what_it_is_changes_nothing(swapped, make, blocks):
    module = linear(make)
    weight, address = module.weight, module.weight.data_ptr()
    module.to(torch.float32).cpu()
    assert module.weight is weight
    assert (weight.data_ptr(), blocks()) == (address, 1)


def test_a_converted_module_leaves_the_block_to_aliases_of_its_parameters(swapped, make, blocks):
    module = linear(make)
    alias = module.weight.detach()
    module.to(torch.float16)
    assert (blocks(), alias.tolist()) == (1, [[7] * (COUNT // 2)] * 2)
    del alias
    assert blocks() == 0


HOLDERS = {
    "weak reference": weakref.ref,
    "graph": lambda parameter: (parameter * torch.ones(COUNT // 2, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("swapped", [True], indirect=True)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_module_whose_parameter_cannot_be_swapped_is_not_converted(swapped, make, blocks, name):
    module = linear(make)
    held = HOLDERS[name](module.weight)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        module.to(torch.float16)
    assert (module.weight.dtype, blocks(), pinpool.torch.is_pinned(module.weight)) == (torch.float32, 1, True)
    del held
    module.to(torch.float16)
    assert (module.weight.dtype, blocks()) == (torch.float16, 0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_functional_call_uses_the_memory_and_keeps_it_only_for_backward(make, blocks, requires_grad):
    module = ordinary_linear()
    weight = module.weight
    inputs = torch.ones(1, COUNT // 2, requires_grad=requires_grad)
    output = torch.func.functional_call(module, {"weight": make(2, COUNT // 2)}, inputs)
    assert output.tolist() == [[7 * COUNT / 2] * 2]
    assert module.weight is weight
    assert blocks() == requires_grad
    del output
    assert blocks() == 0
