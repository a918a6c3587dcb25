//! Reports that compare runs, as text, Markdown, CSV and one HTML file; charts; event files for TensorBoard.

mod arm;
pub mod chart;
pub mod figures;
mod gradient_table;
mod heat_map;
mod html;
mod linear_table;
mod loss_plot;
mod probe_table;
mod selections_table;
pub mod statistics;
mod study;
mod table;
mod tensorboard;

pub use arm::{Arm, Difference};
pub use gradient_table::{gradient_csv, gradient_plot, gradient_table};
pub use html::{GENERATOR, REPORT};
pub use linear_table::{linear_csv, linear_table};
pub use loss_plot::loss_plot;
pub use probe_table::{layer_errors, probe_csv, sigma_errors};
pub use selections_table::{selections_csv, selections_table};
pub use study::{Panel, ReportOptions, Study};
pub use table::result_table;
pub use tensorboard::EventFile;
