"""From files to prompts and to training batches; `README.md` says more."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "chat": ["Encoded", "encode_record"],
        "chat_templates": ["render_template", "with_chat_template"],
        "corpus": ["builtin_documents"],
        "pipeline": ["PipelineConfig", "make_pipeline"],
        "prepared": ["PreparedSamples"],
        "prompt_encoding": ["encode_prompt"],
        "prompts": ["BadPrompt", "Prompt", "parse_prompt", "read_prompts"],
        "readers": ["read_records"],
        "records": ["Conversation", "Record", "Text", "TokenRow", "parse_row"],
        "samples": ["RecordSamples", "Samples"],
        "training_data": ["TrainingData", "load_training_data"],
    },
)
