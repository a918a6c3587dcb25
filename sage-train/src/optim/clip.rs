//! The norm of all gradients, and where it is not a number.

use candle_core::{Result, Tensor};

/// The square root of the sum of squares of all elements, summed in f64 in a fixed order.
///
/// # Errors
/// When a gradient is not f32 on the CPU.
pub fn global_norm(gradients: &[Tensor]) -> Result<f64> {
    let mut sum = 0.0;
    for gradient in gradients {
        sum += sum_of_squares(gradient)?;
    }
    Ok(sum.sqrt())
}

/// The factor that brings a norm down to the limit; 1 for smaller norms and without a limit.
pub fn clip_factor(norm: f64, limit: Option<f64>) -> f64 {
    limit.map_or(1.0, |limit| (limit / norm).min(1.0))
}

/// The first gradient with an element that is not finite.
///
/// # Errors
/// As [`global_norm`].
pub fn first_non_finite(gradients: &[Tensor]) -> Result<Option<usize>> {
    for (n, gradient) in gradients.iter().enumerate() {
        // A sum of squares in f64 cannot overflow from finite f32 elements.
        if !sum_of_squares(gradient)?.is_finite() {
            return Ok(Some(n));
        }
    }
    Ok(None)
}

fn sum_of_squares(tensor: &Tensor) -> Result<f64> {
    let values = tensor.flatten_all()?;
    let (storage, layout) = values.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("gradient norms are computed on the CPU");
    };
    let (start, end) = layout.contiguous_offsets().unwrap_or((0, 0));
    let values = &storage.as_slice::<f32>()?[start..end];
    // Independent lanes, so that the additions do not wait for each other.
    let mut lanes = [0f64; 8];
    let (chunks, tail) = values.as_chunks::<8>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    Ok(lanes.iter().sum::<f64>() + tail.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn clips_large_norms_only() {
        assert_eq!(clip_factor(4.0, Some(1.0)), 0.25);
        assert_eq!(clip_factor(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_factor(0.0, Some(1.0)), 1.0);
        assert_eq!(clip_factor(4.0, None), 1.0);
    }

    #[test]
    fn norm_and_culprit() -> Result<()> {
        let good = Tensor::from_vec((0..19).map(|x| x as f32).collect::<Vec<_>>(), 19, &Device::Cpu)?;
        let other = Tensor::new(&[[3f32, 4.], [0., 0.]], &Device::Cpu)?;
        let expected = ((0..19).map(|x| x * x).sum::<i32>() as f64 + 25.0).sqrt();
        assert!((global_norm(&[good.clone(), other])? - expected).abs() < 1e-9);
        let bad = Tensor::new(&[1f32, f32::NAN], &Device::Cpu)?;
        assert_eq!(first_non_finite(&[good.clone(), bad])?, Some(1));
        assert_eq!(first_non_finite(&[good])?, None);
        Ok(())
    }
}
