//! Pictures and tables of results.

mod loss_plot;
mod table;

pub use loss_plot::loss_plot;
pub use table::{comparison, layer_errors};
