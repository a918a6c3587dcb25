//! `--skip-spikes`: updates are skipped at spikes of the loss or of the gradient norm, also after a resume.

use super::{assert_same, flags, numbers, prepared, run_of};

#[test]
fn a_level_that_stays_up_is_no_spike() {
    let scratch = prepared();
    let run = ["--checkpoint-every", "30", "--eval-every", "0", "--name", "r"];
    scratch.ok(&flags(&[&run[..], &["--steps", "30"]].concat()));
    let raised = ["--resume", "runs/r", "--steps", "200", "--z-loss", "1", "--skip-spikes", "5"];
    let error = scratch.fails(&raised);
    assert!(error.contains("65 updates in a row were skipped"), "{error}");
    assert_eq!(scratch.metrics("r").len(), 95);
}

#[test]
fn spikes_are_skipped_and_nothing_else_changes_them() {
    let scratch = prepared();
    // A limit that many steps exceed.
    let run = ["--steps", "60", "--checkpoint-every", "25", "--eval-every", "0", "--skip-spikes", "0.5"];
    scratch.ok(&flags(&[&run[..], &["--name", "whole"]].concat()));
    let points = scratch.metrics("whole");
    let skipped = points.iter().filter(|point| point.skipped).count();
    assert!((1..45).contains(&skipped), "{skipped} skipped");
    for point in &points {
        let over = |z: Option<f64>| z.is_some_and(|z| z > 0.5);
        let spike = over(point.loss_z) || over(point.grad_norm_z);
        assert_eq!(point.skipped, spike, "step {}", point.step);
    }
    scratch.ok(&flags(&[&run[..], &["--steps", "60", "--name", "none", "--skip-spikes", "0"]].concat()));
    let plain = scratch.metrics("none");
    assert!(plain.iter().all(|point| !point.skipped) && plain[20].loss_z.is_some());
    let first = points.iter().position(|point| point.skipped).expect("a spike");
    assert_eq!(numbers(&points[..first]), numbers(&plain[..first]));
    // A resumed run skips the same updates as the uninterrupted run.
    std::fs::remove_dir_all(run_of(&scratch, "whole").join("checkpoints/step-00000060")).expect("gone");
    std::fs::rename(run_of(&scratch, "whole"), run_of(&scratch, "again")).expect("moved");
    scratch.ok(&flags(&[&run[..], &["--name", "whole"]].concat()));
    scratch.ok(&["--resume", "runs/again"]);
    assert_same(&scratch, "again", "whole", 60);
}
