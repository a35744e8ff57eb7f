"""Train a draft head by distillation: losses, the step, the loop, the run."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "decoding_eval": ["DecodingEvaluator", "DecodingReport", "evaluation_prompts"],
        "heads": ["make_head", "reduce_vocabulary"],
        "losses": ["LossMetrics", "distillation_loss"],
        "optimizer": ["OptimizerConfig", "make_optimizer", "make_schedule"],
        "pairs": ["CompactTargets", "PairCounts", "compact_targets", "pair_mask"],
        "run": ["run_training"],
        "settings": ["TrainSettings", "recorded_settings"],
        "setup": ["TrainInputs", "load_inputs"],
        "step": ["TrainState", "TrainStepConfig", "init_state", "make_train_step", "train_step"],
        "teacher": ["TeacherOutput", "teach"],
        "trainer": ["Trainer"],
    },
)
