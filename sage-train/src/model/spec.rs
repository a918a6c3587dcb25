//! The specification of a parameter: name, shape, initialization, and its kind, which determines how it is stored and
//! updated.

/// Name of the embedding, which may also be the output matrix.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Name of the output matrix in a model with untied embeddings.
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// The name, shape and initialization of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    /// What the parameter is.
    pub kind: Kind,
    /// Shape.
    pub dims: Vec<usize>,
    /// Initialization.
    pub start: Start,
    /// Whether the parameter is stored directly after the parameter before it in the list of specs, without a gap.
    pub follows: bool,
    /// Whether the forward and backward of training use the parameter only in FP8.
    pub fp8: bool,
}

/// The kind of a parameter, which determines weight decay, precision and optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The embedding, which may also be the output matrix.
    Embedding,
    /// The output matrix, if it is not the embedding.
    Output,
    /// The matrix of a linear layer.
    Matrix,
    /// The matrix of a linear layer whose outputs are heads with this many channels.
    Heads(usize),
    /// The bias of linear layers.
    Bias,
    /// The weight of a norm.
    Norm,
    /// The sinks of attention: a logit for each query head.
    Sinks,
    /// A router of SLA2: a matrix for each head.
    Router,
    /// `theta` of SLA2: a number for each query head. It determines the weights of exact attention and of the tail in
    /// the output.
    Theta,
}

impl Kind {
    /// Whether weight decay applies.
    pub fn decays(self) -> bool {
        match self {
            Self::Embedding | Self::Output | Self::Matrix | Self::Heads(_) => true,
            Self::Bias | Self::Norm | Self::Sinks | Self::Router | Self::Theta => false,
        }
    }

    /// Whether the model always reads the parameter in f32, even if it computes in bf16 or f16.
    pub fn is_wide(self) -> bool {
        match self {
            Self::Embedding | Self::Output | Self::Matrix | Self::Heads(_) | Self::Bias => false,
            Self::Norm | Self::Sinks | Self::Router | Self::Theta => true,
        }
    }

    /// Whether the first write of the gradient in a step overwrites the old gradient, which therefore need not be
    /// cleared. The loss head adds to the gradient of the output matrix, and the embedding lookup adds to the gradient
    /// of the embedding.
    pub fn is_overwritten(self) -> bool {
        match self {
            Self::Matrix | Self::Heads(_) | Self::Bias => true,
            Self::Embedding | Self::Output | Self::Norm | Self::Sinks | Self::Router | Self::Theta => false,
        }
    }

    /// Whether an optimizer for hidden matrices updates the parameter.
    pub fn is_hidden_matrix(self) -> bool {
        match self {
            Self::Matrix | Self::Heads(_) => true,
            Self::Embedding
            | Self::Output
            | Self::Bias
            | Self::Norm
            | Self::Sinks
            | Self::Router
            | Self::Theta => false,
        }
    }

    /// Whether only models with SLA2 have the parameter.
    pub fn is_of_sla2(self) -> bool {
        match self {
            Self::Router | Self::Theta => true,
            Self::Embedding
            | Self::Output
            | Self::Matrix
            | Self::Heads(_)
            | Self::Bias
            | Self::Norm
            | Self::Sinks => false,
        }
    }
}

/// How a parameter is initialized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Start {
    /// Drawn from a normal distribution with mean 0 and this standard deviation.
    Normal(f64),
    /// A constant.
    Value(f32),
    /// The identity matrix, for square matrices or stacks of them.
    Identity,
}

impl ParameterSpec {
    /// The initial values, unless they are drawn at random.
    pub fn fixed_start(&self) -> Option<Vec<f32>> {
        match self.start {
            Start::Normal(_) => None,
            Start::Value(value) => Some(vec![value; self.len() as usize]),
            Start::Identity => Some(identity(&self.dims)),
        }
    }

    /// This parameter's initial values, if only models with SLA2 have the parameter; else `None`.
    pub fn start_in_sla2(&self) -> Option<Vec<f32>> {
        self.fixed_start().filter(|_| self.kind.is_of_sla2())
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.dims.iter().map(|&d| d as u64).product()
    }

    /// Whether the parameter has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An identity matrix, or a stack of them: `dims` end with (n, n).
fn identity(dims: &[usize]) -> Vec<f32> {
    let width = dims.last().copied().unwrap_or(1);
    let all: usize = dims.iter().product();
    (0..all).map(|n| f32::from(u8::from(n / width % width == n % width))).collect()
}
