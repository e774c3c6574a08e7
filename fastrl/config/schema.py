"""The configuration tree: closed (unknown keys are errors), frozen, two levels deep, every leaf documented with its unit.

The typed options of an algorithm (`algorithm.advantage_options` and its siblings) are the one third level: their names
and types are those of the keyword arguments of the registered function.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = Field("builtin:tiny", description="Hugging Face folder or hub name of the policy; `builtin:tiny` is the small model shipped with fastrl")
    revision: str | None = Field(None, description="hub revision (branch, tag or commit); null takes the default one")
    tokenizer_path: str | None = Field(None, description="folder or hub name of the tokenizer; null takes it from model.path")
    chat_template: str | None = Field(None, description="file with a Jinja chat template that replaces the tokenizer's own; null keeps it")
    trust_remote_code: bool = Field(False, description="run Python code that a model folder or hub repository brings along")
    attention: Literal["auto", "flash", "varlen", "sdpa", "tiled"] = Field("auto", description="attention of the training passes; auto picks flash-attn, torch varlen or SDPA on a GPU, by type and installation, and tiles of matrix products on a CPU")
    liger: Literal["auto", "on", "off"] = Field("auto", description="Liger's kernels for norms, rotations and gated products; auto takes them on a GPU in bfloat16 where liger-kernel is installed and covers the model type")
    gradient_checkpointing: bool = Field(False, description="recompute each layer's activations in the backward pass instead of keeping them")
    gradient_checkpointing_every: int = Field(1, ge=1, description="recompute one layer in so many; the others keep their activations")
    gradient_checkpointing_keep: Literal["nothing", "products"] = Field("nothing", description="what a recomputed layer keeps: nothing, or the results of its linear layers and fused attention")
    compile: bool = Field(False, description="compile each decoder layer with torch.compile: some minutes at the start, fewer passes over memory afterwards")
    lora_rank: int = Field(0, ge=0, description="rank of low-rank adapters, which then are all that is trained and saved of the policy; 0 trains the whole model")
    lora_alpha: float | None = Field(None, gt=0, description="adapters are scaled by lora_alpha / lora_rank; null is twice the rank")
    lora_targets: list[str] | None = Field(None, description="names of the linear layers that get an adapter, as q_proj; null is all of the decoder layers")


class DataConfig(Section):
    train: str | list[str] = Field("task:arithmetic", description="training prompts: file (.jsonl, .parquet, .csv), `task:NAME`, or `hub:NAME`; a list is concatenated")
    validation: str | list[str] | None = Field(None, description="held-out prompts, same forms as data.train; null means no validation (a task makes its own disjoint split with `task:NAME`)")
    train_options: dict[str, Any] = Field(default_factory=dict, description="options of the training task or hub dataset, e.g. {max_value: 99}")
    validation_options: dict[str, Any] = Field(default_factory=dict, description="options of the validation task or hub dataset; missing ones are taken from data.train_options")
    prompt_column: str = Field("prompt", description="column that holds the prompt: text, or a list of chat messages")
    answer_column: str = Field("answer", description="column that holds the reference answer (`reward_model.ground_truth` is found by itself)")
    source_column: str = Field("data_source", description="column that names the data source, used to report validation per source")
    system_prompt: str | None = Field(None, description="system message put before every prompt that has none")
    prompt_template: str | None = Field(None, description="text with `{prompt}` in it that wraps every plain-text prompt")
    apply_chat_template: bool | None = Field(None, description="render prompts with the chat template; null does it when the tokenizer has one")
    max_prompt_tokens: int = Field(512, ge=1, description="prompts whose rendered form is longer are dropped at load and counted, in tokens")
    max_prompts: int | None = Field(None, ge=1, description="use only the first so many training prompts; null uses all")
    shuffle: bool = Field(True, description="new order each epoch, a pure function of run.seed and the epoch")


class RewardConfig(Section):
    functions: list[str] = Field(default_factory=lambda: ["math"], min_length=1, description="reward components: math, exact, regex, reasoning_gym or `python:package.module:function`, `model:PATH` (a sequence classification model, folder or hub name)")
    model_max_tokens: int | None = Field(None, ge=1, description="longest prompt and response that a reward model scores, in tokens of its own; longer ones are unscorable; null takes the model's max_position_embeddings")
    weights: list[float] | None = Field(None, description="one weight per entry of reward.functions; null means 1 each")
    regex_pattern: str | None = Field(None, description="pattern that the whole response must match to score 1 under `regex`")
    answer_pattern: str | None = Field(None, description="pattern whose last match (group 1 if there is one) is the answer under `exact`; null takes the last number")
    timeout_s: float = Field(10.0, gt=0, le=1e6, description="a reward call that takes longer is killed and its samples are unscorable, in seconds")
    num_workers: int = Field(1, ge=1, description="processes that score responses (math, reasoning_gym, regex and sync Python functions)")
    max_failure_fraction: float = Field(0.1, ge=0, le=1, description="the run stops when a larger fraction of a step's samples could not be scored")
    overlong_buffer_tokens: int = Field(0, ge=0, description="length of the soft penalty zone before rollout.max_response_tokens, in tokens; 0 is off")
    overlong_penalty: float = Field(1.0, ge=0, description="penalty at the full length when the zone is on, in reward units")
    clip_min: float | None = Field(None, description="lower bound of the final score; null is no bound")
    clip_max: float | None = Field(None, description="upper bound of the final score; null is no bound")


class RolloutConfig(Section):
    engine: Literal["auto", "native", "vllm"] = Field("auto", description="generation engine: native is embedded and uses the trainer's own weights, vllm gets them after each step; auto takes vLLM where it is installed and knows the model and the type")
    num_prompts_per_step: int = Field(64, ge=1, description="distinct prompt occurrences per training step, all ranks together")
    num_samples_per_prompt: int = Field(1, ge=1, description="responses generated for each prompt (the group size)")
    max_response_tokens: int = Field(256, ge=1, description="generation stops after so many tokens per response")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; the trainer divides logits by the same value")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling mass; below 1 needs rollout.allow_truncated_sampling")
    top_k: int = Field(0, ge=0, description="sample from the k most likely tokens only; 0 is off")
    min_p: float = Field(0.0, ge=0, lt=1, description="drop tokens less likely than this fraction of the most likely one; 0 is off")
    allow_truncated_sampling: bool = Field(False, description="accept top_p, top_k or min_p although they bias the policy ratio by the kept mass")
    stop: list[str] = Field(default_factory=list, description="strings that end a response (kept in it)")
    stop_token_ids: list[int] = Field(default_factory=list, description="token ids that end a response, besides the model's own end-of-sequence ids")
    kv_budget_tokens: int | None = Field(None, ge=1, description="key/value cache size of one engine in tokens; what does not fit waits; null takes what the batch needs (vLLM on a CPU: at most a quarter of the free memory; on a GPU: what gpu_memory_utilization leaves)")
    max_running_samples: int = Field(256, ge=1, description="vLLM: samples generated at the same time by one engine; the others wait")
    vllm_in_process: bool = Field(False, description="vLLM: in the trainer's process instead of a child of its own; a crash then ends the run")
    vllm_options: dict[str, Any] = Field(default_factory=dict, description="vLLM: further arguments of its engine by their own names, e.g. {kv_cache_dtype: fp8}")
    tensor_parallel_size: int = Field(1, ge=1, description="vLLM: ranks whose engine processes share one model and one stream of samples; divides the number of ranks")
    devices: list[int] | None = Field(None, min_length=1, description="vLLM: GPUs of its own to generate on, by the numbers that the trainer sees, one per rank of a machine in turn; null generates on the trainer's")
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1, description="vLLM: part of the GPU's memory that the engine may use while it generates; null derives it from what the trainer keeps there")
    sleep_level: Literal[0, 1, 2] | None = Field(None, description="vLLM: what it gives back while the policy trains: 0 the key/value cache, 1 also the weights (kept in main memory), 2 also the weights (delivered anew); null is 2 on a shared GPU and 0 elsewhere")
    offload: Literal["none", "optimizer", "all"] = Field("none", description="what of the trainer moves to main memory while samples are generated: nothing, the optimizer's state, or parameters too")
    engine_timeout_s: float = Field(600.0, gt=0, description="vLLM: an engine process that starts longer or says nothing for longer is killed and started again, in seconds")
    bucket_gib: float = Field(0.25, gt=0, le=16, description="size of each of the two staging buckets that carry new weights to an engine process, in GiB; larger tensors are split")
    weight_transport: Literal["auto", "cuda_ipc", "shared_memory", "in_process"] = Field("auto", description="how new weights reach an engine process: CUDA IPC on a GPU, shared memory, or directly to an engine in the trainer's process; auto takes the first that works")
    verify_weights: str = Field("always", pattern=r"^(always|first|off|every [1-9][0-9]*)$", description="after which updates checksums of every tensor and a short greedy response are compared between trainer and engine: always, first (to each engine process), `every K` or off; no response with rollout.offload = all")
    zero_copy: bool = Field(False, description="vLLM: let it compute with the trainer's own weights, held in run.dtype beside float32 masters (one rank, dense decoders): updates move no bytes; where that is impossible they are delivered, and the run says why")


class AlgorithmConfig(Section):
    advantage: str = Field("gae", description="advantage estimator by name, or `package.module:function`")
    advantage_options: dict[str, Any] = Field(default_factory=dict, description="keyword options of the estimator")
    policy_loss: str = Field("clip", description="policy loss by name, or `package.module:function`")
    policy_loss_options: dict[str, Any] = Field(default_factory=dict, description="keyword options of the loss")
    clip_low: float | None = Field(None, ge=0, lt=1, description="lower clip distance of the ratio; null takes the loss's own default (0.2 for clip)")
    clip_high: float | None = Field(None, ge=0, description="upper clip distance of the ratio; null takes the loss's own default (0.2 for clip)")
    dual_clip: float | None = Field(3.0, gt=1, description="cap of the loss for negative advantages, as a ratio; null is off")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "prompt-mean"] | None = Field(None, description="how token losses become one number; null takes the mode of the loss (token-mean for most)")
    loss_scale_factor: float | None = Field(None, gt=0, description="constant divisor of seq-mean-token-sum-norm, in tokens; null takes rollout.max_response_tokens")
    num_updates_per_step: int = Field(1, ge=1, description="optimizer updates that one rollout batch is split into, per epoch over it")
    num_epochs_per_batch: int = Field(1, ge=1, description="passes over one rollout batch")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus in the loss")
    entropy_target: float | None = Field(None, ge=0, description="mean token entropy the bonus steers to by adapting its coefficient, in nats; null keeps it fixed")
    entropy_quantile: float | None = Field(None, gt=0, lt=1, description="train on the fraction of tokens with the highest entropy only; null trains on all")
    kl_loss_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference model in the loss; 0 loads no reference for it")
    kl_loss_kind: str = Field("k3", description="KL estimator in the loss: k1, abs, k2, k3, full, or with `+` for the gradient of k2")
    kl_reward_coef: float = Field(0.0, ge=0, description="weight beta of the KL subtracted from each token's reward; 0 is off")
    kl_reward_kind: str = Field("k1", description="KL estimator in the reward: k1, abs, k2, k3 or full")
    kl_controller: Literal["fixed", "adaptive"] = Field("fixed", description="whether kl_reward_coef adapts towards algorithm.kl_target")
    kl_target: float = Field(0.1, gt=0, description="KL per token that the adaptive controller aims at, in nats")
    kl_horizon: int = Field(10000, ge=1, description="speed of the adaptive controller, in sequences")
    kl_unbiased: bool = Field(False, description="multiply the KL in the loss by the policy ratio (importance-corrected)")
    router_aux_coef: float = Field(0.0, ge=0, description="weight of the router's load-balancing loss of a mixture-of-experts model; 0 is off, above it a pass more per update counts where the tokens go")
    correction: str = Field("token_truncate", description="weights against the engine/trainer mismatch: a preset name, `none`, or `package.module:function`")
    correction_options: dict[str, Any] = Field(default_factory=dict, description="keyword options of the correction")
    dynamic_sampling: bool = Field(False, description="drop groups whose filter metric does not vary and refill with new prompts")
    dynamic_sampling_metric: str = Field("score", description="what must vary inside a group: score, or the name of a reward component")
    max_refills: int = Field(3, ge=0, description="further generation rounds per step that dynamic sampling may use")
    on_exhausted: Literal["train", "stop"] = Field("train", description="when refills run out: train on the groups there are, or stop the run")
    overlong_masking: bool = Field(False, description="responses cut at the length limit leave the loss")
    overlong_leaves_baseline: bool = Field(False, description="with overlong_masking: such responses leave the group baseline too")
    pf_ppo_mode: Literal["none", "pow", "max_min", "max_random"] = Field("none", description="resample the rollout batch by reward before PPO updates")
    pf_ppo_power: float = Field(2.0, gt=0, description="exponent of |score| under pf_ppo_mode = pow")


class CriticConfig(Section):
    path: str | None = Field(None, description="Hugging Face folder or hub name the critic's trunk starts from; null takes model.path")
    lr: float = Field(1e-5, gt=0, description="peak learning rate of the critic")
    warmup_steps: int = Field(0, ge=0, description="training steps in which only the critic is updated")
    lr_warmup_updates: int = Field(0, ge=0, description="optimizer updates over which the critic's rate rises from 0")
    value_clip: float | None = Field(0.5, gt=0, description="clip distance of new values around old ones; null is off")
    huber_delta: float | None = Field(None, gt=0, description="use a Huber loss with this threshold instead of the squared error; null is off")
    max_grad_norm: float = Field(1.0, gt=0, description="global gradient norm the critic is clipped to")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of the critic")
    num_epochs_per_batch: int | None = Field(None, ge=1, description="critic passes over one rollout batch; null takes algorithm.num_epochs_per_batch")


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0, description="peak learning rate of the policy")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after warm-up, over all optimizer updates of the run; linear and cosine end at min_lr_ratio")
    lr_warmup_updates: int = Field(0, ge=0, description="optimizer updates over which the rate rises from 0")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="final rate as a fraction of the peak")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="global gradient norm that updates are clipped to")
    total_steps: int | None = Field(None, ge=0, description="training steps of the run; give this or total_epochs")
    total_epochs: float | None = Field(None, gt=0, description="passes over the training prompts; give this or total_steps")
    max_skipped_updates: int = Field(3, ge=1, description="training stops after so many non-finite updates in a row")


class RunConfig(Section):
    name: str | None = Field(None, description="name of the run folder; null makes one from the config's file name and the time")
    dir: str = Field("runs", description="folder that holds the run folders")
    seed: int = Field(0, ge=0, description="everything random follows from it: data order, sampling, initial critic head")
    device: str = Field("auto", description="cpu, cuda or cuda:N; auto takes a GPU where there is one")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="compute type of the models (parameters and optimizer state are float32 or wider)")
    num_threads: int | None = Field(None, ge=1, description="CPU threads torch may use; null leaves torch's own choice")
    max_tokens_per_microbatch: int = Field(8192, ge=1, description="unique tokens (prompts once, responses each) in one forward and backward pass")
    share_prompts: bool = Field(True, description="compute what the sequences of a micro-batch have in common from their start (system prompt, prompt) once instead of once per response")
    validate_before_training: bool = Field(True, description="score the held-out prompts before the first step")
    validation_every_steps: int = Field(0, ge=0, description="validate after every so many steps; 0 validates only at the end")
    validation_num_samples: int = Field(1, ge=1, description="responses per held-out prompt")
    validation_temperature: float = Field(0.0, ge=0, description="sampling temperature of validation; 0 is greedy")
    validation_top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass of validation sampling")
    validation_max_prompts: int | None = Field(None, ge=1, description="use only the first so many held-out prompts; null uses all")
    checkpoint_every_steps: int = Field(0, ge=0, description="save after every so many steps; 0 saves only at the end")
    async_checkpoint: bool = Field(False, description="write checkpoints beside the training: a step waits only for the copy to CPU memory, which holds one copy more of weights and moments")
    keep_last_checkpoints: int = Field(2, ge=1, description="how many of the newest checkpoints stay on disk")
    keep_best_checkpoint: bool = Field(False, description="also keep the checkpoint with the best validation score")


class ParallelConfig(Section):
    processes: int | None = Field(None, ge=1, description="ranks that `fastrl train` starts on this machine; null is one per visible GPU, or one on a CPU; torchrun decides for itself")
    replicate: int | None = Field(None, ge=1, description="copies of each model over the ranks, each sharded over parallel.shard of them; null is all ranks / parallel.shard, or 1")
    shard: int | None = Field(None, ge=1, description="ranks that each copy of a model is sharded over; null is all ranks / parallel.replicate; 1 keeps whole models and sums their gradients")
    sequence: int = Field(1, ge=1, description="consecutive ranks that split every micro-batch between them (rows, and heads in attention), for sequences too long for one; at most the number of attention heads")
    offload: Literal["none", "reference", "optimizer", "parameters"] = Field("reference", description="what waits in CPU memory of a GPU run, each with those before it: the reference model between its passes, the moments between updates, masters and gradients of sharded models")
    timeout_s: float = Field(600.0, gt=0, description="a rank that joins later, or a collective that waits longer, ends the run, in seconds")


class LoggingConfig(Section):
    console: Literal["auto", "live", "plain", "quiet"] = Field("auto", description="live table on a terminal, one parseable line a step otherwise; auto looks at the terminal")
    trackers: list[Literal["tensorboard", "wandb", "swanlab", "mlflow"]] = Field(default_factory=list, description="experiment trackers to write to, besides metrics.jsonl")
    project: str = Field("fastrl", description="project name given to the trackers")
    rollouts_every_steps: int = Field(1, ge=0, description="write generated samples to rollouts/ every so many steps; 0 is off")
    rollouts_max_samples: int = Field(64, ge=1, description="samples written per step, the first by sample id of all ranks together")


class Config(Section):
    """One run, completely described. `fastrl config --explain KEY` prints any leaf."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the policy")
    data: DataConfig = Field(default_factory=DataConfig, description="prompts and how they are rendered")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="how responses are scored")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="generation")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="advantage estimator, policy loss, KL and corrections")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the value model, where the estimator needs one")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="the policy's optimizer and the length of training")
    run: RunConfig = Field(default_factory=RunConfig, description="where and how the run happens")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="processes")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="what is shown and kept")
