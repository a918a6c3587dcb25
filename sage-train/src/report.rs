//! Pictures, tables and event files of results.

mod loss_plot;
mod table;
mod tensorboard;

pub use loss_plot::loss_plot;
pub use table::{comparison, layer_errors};
pub use tensorboard::EventFile;
