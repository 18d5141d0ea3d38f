"""Files and settings of other engines: values in, text out, and a validator each that names the rule broken.

=====================  ===========================================  ====================================
module                 engine                                       what
=====================  ===========================================  ====================================
``choices``            Medusa, Hydra, EAGLE-1, TensorRT-LLM          static trees as lists of rank paths
``vllm``               vLLM                                         token tree, draft lengths per batch
``sglang``             SGLang                                       EAGLE flags, DSpark speed table
``tensorrt_llm``       TensorRT-LLM                                 dynamic tree, draft length schedule
``growmap``            Sequoia, UMbreLLa                            growmaps, acceptance vector
``llama_cpp``          llama.cpp                                    draft flags, batch costs
``jetspec``            JetSpec                                      acceptance by depth and rank
``ppd``                the PPD authors' research code               dynamic sparse trees, accuracies
``medusa_accuracies``  Medusa                                       accuracies of the heads, from a CSV
=====================  ===========================================  ====================================

``docs/formats.md`` says where each format is defined and which versions of the engines take it. Nothing here runs what
it reads: literals are scanned before they are parsed, and ``.pt`` files are opened with ``weights_only`` alone.
"""
