"""Recurrences in NumPy, one token of one row at a time."""

from typing import Any

import numpy as np

from tests.transformer.formulas import Array, softmax

Weights = dict[str, Array]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def elman(x: Array, w: Weights, depth: int) -> Array:  # [T, D] -> [T, H]
    """Return the states of h = tanh(W x + U h + b), with one more tanh for each deeper layer."""
    h, states = np.zeros(w["recurrent"].shape[1]), []
    for token in x:
        h = np.tanh(token @ w["input"] + h @ w["recurrent"] + w["input_bias"])
        for layer in range(1, depth):
            h = np.tanh(h @ w[f"deeper_{layer}"] + w[f"deeper_{layer}_bias"])
        states.append(h)
    return np.array(states)


def lstm_step(
    h: Array,  # [H]
    c: Array,  # [H]
    gates: Array,  # [4, H] input, forget, candidate, output
) -> tuple[Array, Array]:
    c = sigmoid(gates[1]) * c + sigmoid(gates[0]) * np.tanh(gates[2])
    return sigmoid(gates[3]) * np.tanh(c), c


def lstm(
    x: Array,  # [T, D]
    w: Weights,
    h: Array | float = 0.0,  # [H]
    c: Array | float = 0.0,  # [H]
) -> Array:  # [T, H]
    states = []
    h, c = (each + np.zeros(len(w["recurrent"])) for each in (h, c))
    for token in x:
        from_x = np.einsum("D,DGH->GH", token, w["input"])
        from_h = np.einsum("S,SGH->GH", h, w["recurrent"])
        h, c = lstm_step(h, c, from_x + from_h + w["bias"])
        states.append(h)
    return np.array(states)


def initial_lstm_state(m: Array, w: Weights) -> tuple[Array, Array]:  # [D] -> [H], [H]
    """Return the first state of an LSTM whose initial state comes from a vector."""
    first = np.tanh(m @ w["first_hidden"] + w["first_hidden_bias"])
    return first, m @ w["first_cell"] + w["first_cell_bias"]


def seq2seq(x: Array, memory: Array, w: dict[str, Any]) -> Array:  # [T, D], [S, D] -> [T, D]
    return lstm(x, w["forward"], *initial_lstm_state(memory[-1], w))


def bahdanau(
    x: Array,  # [T, D]
    memory: Array,  # [S, D]
    w: Weights,
) -> tuple[Array, Array]:  # [T, D], [T, S]
    """Compute appendix A.2.2 of the paper: z and r are gates, t is the deep output."""
    s, outputs, weights = np.tanh(memory[0] @ w["first"] + w["first_bias"]), [], []
    for token in x:
        scores = np.tanh(s @ w["score_query"] + memory @ w["score_key"]) @ w["score_vector"]
        weights.append(softmax(scores))
        c = weights[-1] @ memory
        rows = lambda gate, c=c, token=token: (  # noqa: E731
            token @ w["input"][:, gate] + w["input_bias"][gate] + c @ w["context"][:, gate]
        )
        z = sigmoid(rows(0) + s @ w["gates"][:, 0])
        r = sigmoid(rows(1) + s @ w["gates"][:, 1])
        t = token @ w["output_token"].swapaxes(0, 1) + s @ w["output_state"].swapaxes(0, 1)
        t = t + c @ w["output_context"].swapaxes(0, 1) + w["output_state_bias"]
        outputs.append(np.maximum(t[0], t[1]))
        s = (1 - z) * s + z * np.tanh(rows(2) + (r * s) @ w["candidate"])
    return np.array(outputs), np.array(weights)


def luong(
    x: Array,  # [T, D]
    memory: Array,  # [S, D]
    w: Weights,
) -> tuple[Array, Array]:  # [T, D], [T, S]
    """Compute equations 5 to 8 of the paper, with input feeding; the names of the weights select
    the score.
    """
    h, c = initial_lstm_state(memory[-1], w)
    input_feed, outputs, weights = np.zeros(x.shape[1]), [], []
    for token in x:
        gates = np.einsum("D,DGH->GH", token, w["input"]) + w["bias"]
        gates = gates + np.einsum("S,SGH->GH", h, w["recurrent"])
        h, c = lstm_step(h, c, gates + np.einsum("D,DGH->GH", input_feed, w["feed"]))
        if "score_vector" in w:  # concat
            scores = np.tanh(h @ w["score_query"] + memory @ w["score_key"]) @ w["score_vector"]
        else:  # general, or dot
            scores = memory @ w.get("score_key", np.eye(len(h))) @ h
        weights.append(softmax(scores))
        input_feed = np.tanh(np.concatenate([weights[-1] @ memory, h]) @ w["combine"])
        outputs.append(input_feed)
    return np.array(outputs), np.array(weights)


def gnmt_encoder(x: Array, w: dict[str, Any], layers: int) -> Array:  # [T, D] -> [T, D]
    """Compute the encoder: layer 1 reads in both directions, layer 2 takes 2 D, later layers have
    residuals.
    """
    back = lstm(x[::-1], w["backward"])[::-1]
    x = np.concatenate([lstm(x, w["layer_0"]), back], axis=-1)
    x = lstm(x, w["layer_1"])
    for layer in range(2, layers):
        x = x + lstm(x, w[f"layer_{layer}"])
    return x


def gnmt_decoder(
    x: Array,  # [T, D]
    memory: Array,  # [S, D]
    w: dict[str, Any],
    layers: int,
) -> tuple[Array, Array]:  # [T, D], [T, S]
    """Compute all layers of one token before the next token, as in the paper (section 3, equation
    4).
    """
    width = x.shape[1]
    cells = [(np.zeros(width), np.zeros(width))] * layers
    outputs, weights = [], []
    for token in x:
        hidden = np.tanh(cells[0][0] @ w["score_query"] + memory @ w["score_key"])
        weights.append(softmax(hidden @ w["score_vector"]))
        context = weights[-1] @ memory
        y = token
        for layer in range(layers):
            h, c = cells[layer]
            own = w if layer == 0 else w[f"layer_{layer}"]
            read = np.concatenate([y, context])
            into = np.concatenate([w["input"], w["context"]]) if layer == 0 else own["input"]
            gates = np.einsum("D,DGH->GH", read, into) + own["bias"]
            cells[layer] = lstm_step(h, c, gates + np.einsum("S,SGH->GH", h, own["recurrent"]))
            y = cells[layer][0] + (y if layer >= 2 else 0)
        outputs.append(y)
    return np.array(outputs), np.array(weights)


def cheng(x: Array, w: Weights) -> Array:  # [T, D] -> [T, D]
    """Compute equations 5 to 9 of the paper, with lists as tapes."""
    hidden: list[Array] = []
    cells: list[Array] = []
    summary = np.zeros(x.shape[1])
    for token in x:
        h, c = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        if hidden:
            projected_query = token @ w["score_token"] + summary @ w["score_query"]
            scores = (
                np.tanh(np.array(hidden) @ w["score_key"] + projected_query) @ w["score_vector"]
            )
            h, c = softmax(scores) @ hidden, softmax(scores) @ cells
        gates = np.einsum("D,DGH->GH", token, w["input"]) + w["bias"]
        summary = h
        h, c = lstm_step(h, c, gates + np.einsum("S,SGH->GH", h, w["recurrent"]))
        hidden.append(h)
        cells.append(c)
    return np.array(hidden)
