//! SwiGLU on slices of f32.

use multiversion::multiversion;

use crate::cpu::lanes;

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = -x * std::f32::consts::LOG2_E;
    // If 2^e would be infinite, the sigmoid and its product with x are 0.
    if e > 127.0 { 0.0 } else { 1.0 / (1.0 + lanes::exp2(e)) }
}

/// `out = silu(gate) o up`.
#[multiversion(targets = "simd")]
pub(crate) fn gated(out: &mut [f32], gate: &[f32], up: &[f32]) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate * sigmoid(gate) * up;
    }
}

/// The gradients of gate and up for the output's gradient `dy`.
#[multiversion(targets = "simd")]
pub(crate) fn gated_backward(dgate: &mut [f32], dup: &mut [f32], gate: &[f32], up: &[f32], dy: &[f32]) {
    let inputs = gate.iter().zip(up).zip(dy);
    for ((dgate, dup), ((&gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
        let s = sigmoid(gate);
        *dup = dy * gate * s;
        *dgate = dy * up * s * (1.0 + gate * (1.0 - s));
    }
}
