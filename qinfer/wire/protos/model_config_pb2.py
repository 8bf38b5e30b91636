"""Messages of model_config.proto; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b'\n\x12model_config.proto\x12\tinference"\x96\x01\n\x10Mode'
    b"lRateLimiter\x127\n\tresources\x18\x01 \x03(\x0b2$.infere"
    b"nce.ModelRateLimiter.Resource\x12\x10\n\x08priorit"
    b"y\x18\x02 \x01(\r\x1a7\n\x08Resource\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0e\n\x06glo"
    b'bal\x18\x02 \x01(\x08\x12\r\n\x05count\x18\x03 \x01(\r"\x87\x04\n\x12ModelInstan'
    b'ceGroup\x12\x0c\n\x04name\x18\x01 \x01(\t\x120\n\x04kind\x18\x04 \x01(\x0e2".in'
    b"ference.ModelInstanceGroup.Kind\x12\r\n\x05count"
    b"\x18\x02 \x01(\x05\x121\n\x0crate_limiter\x18\x06 \x01(\x0b2\x1b.inference"
    b".ModelRateLimiter\x12\x0c\n\x04gpus\x18\x03 \x03(\x05\x12H\n\x11secon"
    b"dary_devices\x18\x08 \x03(\x0b2-.inference.ModelInst"
    b"anceGroup.SecondaryDevice\x12\x0f\n\x07profile\x18\x05 \x03"
    b"(\t\x12\x0f\n\x07passive\x18\x07 \x01(\x08\x12\x13\n\x0bhost_policy\x18\t \x01(\t"
    b"\x1a\x9c\x01\n\x0fSecondaryDevice\x12O\n\x04kind\x18\x01 \x01(\x0e2A.inf"
    b"erence.ModelInstanceGroup.SecondaryDevic"
    b"e.SecondaryDeviceKind\x12\x11\n\tdevice_id\x18\x02 \x01(\x03"
    b'"%\n\x13SecondaryDeviceKind\x12\x0e\n\nKIND_NVDLA\x10\x00"'
    b"A\n\x04Kind\x12\r\n\tKIND_AUTO\x10\x00\x12\x0c\n\x08KIND_GPU\x10\x01\x12\x0c\n\x08"
    b'KIND_CPU\x10\x02\x12\x0e\n\nKIND_MODEL\x10\x03"#\n\x12ModelTenso'
    b'rReshape\x12\r\n\x05shape\x18\x01 \x03(\x03"\xd3\x02\n\nModelInput\x12\x0c'
    b"\n\x04name\x18\x01 \x01(\t\x12&\n\tdata_type\x18\x02 \x01(\x0e2\x13.infere"
    b"nce.DataType\x12,\n\x06format\x18\x03 \x01(\x0e2\x1c.inference"
    b".ModelInput.Format\x12\x0c\n\x04dims\x18\x04 \x03(\x03\x12.\n\x07resh"
    b"ape\x18\x05 \x01(\x0b2\x1d.inference.ModelTensorReshape"
    b"\x12\x17\n\x0fis_shape_tensor\x18\x06 \x01(\x08\x12\x1a\n\x12allow_ragge"
    b"d_batch\x18\x07 \x01(\x08\x12\x10\n\x08optional\x18\x08 \x01(\x08\x12\x1f\n\x17is_no"
    b'n_linear_format_io\x18\t \x01(\x08";\n\x06Format\x12\x0f\n\x0bFO'
    b"RMAT_NONE\x10\x00\x12\x0f\n\x0bFORMAT_NHWC\x10\x01\x12\x0f\n\x0bFORMAT_N"
    b'CHW\x10\x02"\xd3\x01\n\x0bModelOutput\x12\x0c\n\x04name\x18\x01 \x01(\t\x12&\n\td'
    b"ata_type\x18\x02 \x01(\x0e2\x13.inference.DataType\x12\x0c\n\x04d"
    b"ims\x18\x03 \x03(\x03\x12.\n\x07reshape\x18\x05 \x01(\x0b2\x1d.inference.M"
    b"odelTensorReshape\x12\x16\n\x0elabel_filename\x18\x04 \x01("
    b"\t\x12\x17\n\x0fis_shape_tensor\x18\x06 \x01(\x08\x12\x1f\n\x17is_non_lin"
    b'ear_format_io\x18\x07 \x01(\x08"\xd9\x02\n\nBatchInput\x12(\n\x04ki'
    b"nd\x18\x01 \x01(\x0e2\x1a.inference.BatchInput.Kind\x12\x13\n\x0b"
    b"target_name\x18\x02 \x03(\t\x12&\n\tdata_type\x18\x03 \x01(\x0e2\x13.i"
    b'nference.DataType\x12\x14\n\x0csource_input\x18\x04 \x03(\t"'
    b"\xcd\x01\n\x04Kind\x12\x17\n\x13BATCH_ELEMENT_COUNT\x10\x00\x12#\n\x1fBAT"
    b"CH_ACCUMULATED_ELEMENT_COUNT\x10\x01\x12-\n)BATCH_"
    b"ACCUMULATED_ELEMENT_COUNT_WITH_ZERO\x10\x02\x12$\n"
    b" BATCH_MAX_ELEMENT_COUNT_AS_SHAPE\x10\x03\x12\x14\n\x10B"
    b"ATCH_ITEM_SHAPE\x10\x04\x12\x1c\n\x18BATCH_ITEM_SHAPE_FL"
    b'ATTEN\x10\x05"\x8f\x01\n\x0bBatchOutput\x12\x13\n\x0btarget_name\x18\x01'
    b" \x03(\t\x12)\n\x04kind\x18\x02 \x01(\x0e2\x1b.inference.BatchOutp"
    b'ut.Kind\x12\x14\n\x0csource_input\x18\x03 \x03(\t"*\n\x04Kind\x12"\n'
    b'\x1eBATCH_SCATTER_WITH_INPUT_SHAPE\x10\x00"\x90\x02\n\x12Mo'
    b"delVersionPolicy\x126\n\x06latest\x18\x01 \x01(\x0b2$.infer"
    b"ence.ModelVersionPolicy.LatestH\x00\x120\n\x03all\x18"
    b"\x02 \x01(\x0b2!.inference.ModelVersionPolicy.All"
    b"H\x00\x12:\n\x08specific\x18\x03 \x01(\x0b2&.inference.ModelVe"
    b"rsionPolicy.SpecificH\x00\x1a\x1e\n\x06Latest\x12\x14\n\x0cnum_"
    b"versions\x18\x01 \x01(\r\x1a\x05\n\x03All\x1a\x1c\n\x08Specific\x12\x10\n\x08ver"
    b'sions\x18\x01 \x03(\x03B\x0f\n\rpolicy_choice"\xfd\r\n\x17ModelOp'
    b"timizationPolicy\x127\n\x05graph\x18\x01 \x01(\x0b2(.infere"
    b"nce.ModelOptimizationPolicy.Graph\x12B\n\x08pri"
    b"ority\x18\x02 \x01(\x0e20.inference.ModelOptimizatio"
    b"nPolicy.ModelPriority\x125\n\x04cuda\x18\x03 \x01(\x0b2'.in"
    b"ference.ModelOptimizationPolicy.Cuda\x12X\n\x16"
    b"execution_accelerators\x18\x04 \x01(\x0b28.inference"
    b".ModelOptimizationPolicy.ExecutionAccele"
    b"rators\x12R\n\x13input_pinned_memory\x18\x05 \x01(\x0b25.in"
    b"ference.ModelOptimizationPolicy.PinnedMe"
    b"moryBuffer\x12S\n\x14output_pinned_memory\x18\x06 \x01(\x0b"
    b"25.inference.ModelOptimizationPolicy.Pin"
    b"nedMemoryBuffer\x12&\n\x1egather_kernel_buffer_"
    b"threshold\x18\x07 \x01(\r\x12\x16\n\x0eeager_batching\x18\x08 \x01(\x08\x1a"
    b"\x16\n\x05Graph\x12\r\n\x05level\x18\x01 \x01(\x05\x1a\xba\x05\n\x04Cuda\x12\x0e\n\x06grap"
    b"hs\x18\x01 \x01(\x08\x12\x18\n\x10busy_wait_events\x18\x02 \x01(\x08\x12E\n\ngr"
    b"aph_spec\x18\x03 \x03(\x0b21.inference.ModelOptimiza"
    b"tionPolicy.Cuda.GraphSpec\x12\x1a\n\x12output_copy"
    b"_stream\x18\x04 \x01(\x08\x1a\xa4\x04\n\tGraphSpec\x12\x12\n\nbatch_siz"
    b"e\x18\x01 \x01(\x05\x12K\n\x05input\x18\x02 \x03(\x0b2<.inference.Model"
    b"OptimizationPolicy.Cuda.GraphSpec.InputE"
    b"ntry\x12W\n\x11graph_lower_bound\x18\x03 \x01(\x0b2<.infere"
    b"nce.ModelOptimizationPolicy.Cuda.GraphSp"
    b"ec.LowerBound\x1a\x14\n\x05Shape\x12\x0b\n\x03dim\x18\x01 \x03(\x03\x1a\xdf\x01\n\n"
    b"LowerBound\x12\x12\n\nbatch_size\x18\x01 \x01(\x05\x12V\n\x05input\x18"
    b"\x02 \x03(\x0b2G.inference.ModelOptimizationPolic"
    b"y.Cuda.GraphSpec.LowerBound.InputEntry\x1ae"
    b"\n\nInputEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12F\n\x05value\x18\x02 \x01(\x0b"
    b"27.inference.ModelOptimizationPolicy.Cud"
    b"a.GraphSpec.Shape:\x028\x01\x1ae\n\nInputEntry\x12\x0b\n\x03k"
    b"ey\x18\x01 \x01(\t\x12F\n\x05value\x18\x02 \x01(\x0b27.inference.Mode"
    b"lOptimizationPolicy.Cuda.GraphSpec.Shape"
    b":\x028\x01\x1a\xa4\x03\n\x15ExecutionAccelerators\x12g\n\x19gpu_ex"
    b"ecution_accelerator\x18\x01 \x03(\x0b2D.inference.Mo"
    b"delOptimizationPolicy.ExecutionAccelerat"
    b"ors.Accelerator\x12g\n\x19cpu_execution_acceler"
    b"ator\x18\x02 \x03(\x0b2D.inference.ModelOptimization"
    b"Policy.ExecutionAccelerators.Accelerator"
    b"\x1a\xb8\x01\n\x0bAccelerator\x12\x0c\n\x04name\x18\x01 \x01(\t\x12h\n\nparame"
    b"ters\x18\x02 \x03(\x0b2T.inference.ModelOptimization"
    b"Policy.ExecutionAccelerators.Accelerator"
    b".ParametersEntry\x1a1\n\x0fParametersEntry\x12\x0b\n\x03k"
    b"ey\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1a$\n\x12PinnedMem"
    b'oryBuffer\x12\x0e\n\x06enable\x18\x01 \x01(\x08"I\n\rModelPriori'
    b"ty\x12\x14\n\x10PRIORITY_DEFAULT\x10\x00\x12\x10\n\x0cPRIORITY_MAX"
    b'\x10\x01\x12\x10\n\x0cPRIORITY_MIN\x10\x02"\xdb\x01\n\x10ModelQueuePolic'
    b"y\x12A\n\x0etimeout_action\x18\x01 \x01(\x0e2).inference.Mo"
    b"delQueuePolicy.TimeoutAction\x12$\n\x1cdefault_"
    b"timeout_microseconds\x18\x02 \x01(\x04\x12\x1e\n\x16allow_time"
    b"out_override\x18\x03 \x01(\x08\x12\x16\n\x0emax_queue_size\x18\x04 \x01"
    b'(\r"&\n\rTimeoutAction\x12\n\n\x06REJECT\x10\x00\x12\t\n\x05DELAY'
    b'\x10\x01"\x9b\x03\n\x14ModelDynamicBatching\x12\x1c\n\x14preferred'
    b"_batch_size\x18\x01 \x03(\x05\x12$\n\x1cmax_queue_delay_mic"
    b"roseconds\x18\x02 \x01(\x04\x12\x19\n\x11preserve_ordering\x18\x03 \x01"
    b"(\x08\x12\x17\n\x0fpriority_levels\x18\x04 \x01(\x04\x12\x1e\n\x16default_p"
    b"riority_level\x18\x05 \x01(\x04\x129\n\x14default_queue_pol"
    b"icy\x18\x06 \x01(\x0b2\x1b.inference.ModelQueuePolicy\x12W"
    b"\n\x15priority_queue_policy\x18\x07 \x03(\x0b28.inferenc"
    b"e.ModelDynamicBatching.PriorityQueuePoli"
    b"cyEntry\x1aW\n\x18PriorityQueuePolicyEntry\x12\x0b\n\x03k"
    b"ey\x18\x01 \x01(\x04\x12*\n\x05value\x18\x02 \x01(\x0b2\x1b.inference.Mode"
    b'lQueuePolicy:\x028\x01"\xee\n\n\x15ModelSequenceBatchi'
    b"ng\x12A\n\x06direct\x18\x03 \x01(\x0b2/.inference.ModelSequ"
    b"enceBatching.StrategyDirectH\x00\x12A\n\x06oldest\x18"
    b"\x04 \x01(\x0b2/.inference.ModelSequenceBatching."
    b"StrategyOldestH\x00\x12&\n\x1emax_sequence_idle_mi"
    b"croseconds\x18\x01 \x01(\x04\x12D\n\rcontrol_input\x18\x02 \x03(\x0b2"
    b"-.inference.ModelSequenceBatching.Contro"
    b"lInput\x125\n\x05state\x18\x05 \x03(\x0b2&.inference.ModelS"
    b"equenceBatching.State\x12\x1a\n\x12iterative_seque"
    b"nce\x18\x06 \x01(\x08\x1a\xb1\x02\n\x07Control\x12;\n\x04kind\x18\x01 \x01(\x0e2-.in"
    b"ference.ModelSequenceBatching.Control.Ki"
    b"nd\x12\x18\n\x10int32_false_true\x18\x02 \x03(\x05\x12\x17\n\x0ffp32_fal"
    b"se_true\x18\x03 \x03(\x02\x12\x17\n\x0fbool_false_true\x18\x05 \x03(\x08\x12&"
    b'\n\tdata_type\x18\x04 \x01(\x0e2\x13.inference.DataType"u'
    b"\n\x04Kind\x12\x1a\n\x16CONTROL_SEQUENCE_START\x10\x00\x12\x1a\n\x16CO"
    b"NTROL_SEQUENCE_READY\x10\x01\x12\x18\n\x14CONTROL_SEQUEN"
    b"CE_END\x10\x02\x12\x1b\n\x17CONTROL_SEQUENCE_CORRID\x10\x03\x1aW\n"
    b"\x0cControlInput\x12\x0c\n\x04name\x18\x01 \x01(\t\x129\n\x07control\x18\x02"
    b" \x03(\x0b2(.inference.ModelSequenceBatching.C"
    b"ontrol\x1a\x8a\x01\n\x0cInitialState\x12&\n\tdata_type\x18\x01 \x01"
    b"(\x0e2\x13.inference.DataType\x12\x0c\n\x04dims\x18\x02 \x03(\x03\x12\x13\n"
    b"\tzero_data\x18\x03 \x01(\x08H\x00\x12\x13\n\tdata_file\x18\x04 \x01(\tH\x00\x12"
    b"\x0c\n\x04name\x18\x05 \x01(\tB\x0c\n\nstate_data\x1a\xf3\x01\n\x05State\x12\x12\n"
    b"\ninput_name\x18\x01 \x01(\t\x12\x13\n\x0boutput_name\x18\x02 \x01(\t\x12&"
    b"\n\tdata_type\x18\x03 \x01(\x0e2\x13.inference.DataType\x12\x0c"
    b"\n\x04dims\x18\x04 \x03(\x03\x12D\n\rinitial_state\x18\x05 \x03(\x0b2-.in"
    b"ference.ModelSequenceBatching.InitialSta"
    b"te\x12(\n use_same_buffer_for_input_output\x18\x06"
    b" \x01(\x08\x12\x1b\n\x13use_growable_memory\x18\x07 \x01(\x08\x1aX\n\x0eStr"
    b"ategyDirect\x12$\n\x1cmax_queue_delay_microseco"
    b"nds\x18\x01 \x01(\x04\x12 \n\x18minimum_slot_utilization\x18\x02 "
    b"\x01(\x02\x1a\x90\x01\n\x0eStrategyOldest\x12\x1f\n\x17max_candidate_"
    b"sequences\x18\x01 \x01(\x05\x12\x1c\n\x14preferred_batch_size\x18"
    b"\x02 \x03(\x05\x12$\n\x1cmax_queue_delay_microseconds\x18\x03 "
    b"\x01(\x04\x12\x19\n\x11preserve_ordering\x18\x04 \x01(\x08B\x11\n\x0fstrate"
    b'gy_choice"\x95\x03\n\x0fModelEnsembling\x12-\n\x04step\x18\x01 '
    b"\x03(\x0b2\x1f.inference.ModelEnsembling.Step\x12\x1d\n\x15"
    b"max_inflight_requests\x18\x02 \x01(\r\x1a\xb3\x02\n\x04Step\x12\x12\n\n"
    b"model_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\x03\x12"
    b"@\n\tinput_map\x18\x03 \x03(\x0b2-.inference.ModelEnse"
    b"mbling.Step.InputMapEntry\x12B\n\noutput_map\x18"
    b"\x04 \x03(\x0b2..inference.ModelEnsembling.Step.O"
    b"utputMapEntry\x12\x17\n\x0fmodel_namespace\x18\x05 \x01(\t\x1a/"
    b"\n\rInputMapEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 "
    b"\x01(\t:\x028\x01\x1a0\n\x0eOutputMapEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r"
    b'\n\x05value\x18\x02 \x01(\t:\x028\x01"&\n\x0eModelParameter\x12\x14\n\x0cs'
    b'tring_value\x18\x01 \x01(\t"\xd9\x02\n\x0bModelWarmup\x12\x0c\n\x04nam'
    b"e\x18\x01 \x01(\t\x12\x12\n\nbatch_size\x18\x02 \x01(\r\x122\n\x06inputs\x18\x03 "
    b'\x03(\x0b2".inference.ModelWarmup.InputsEntry\x12'
    b"\r\n\x05count\x18\x04 \x01(\r\x1a\x97\x01\n\x05Input\x12&\n\tdata_type\x18\x01 "
    b"\x01(\x0e2\x13.inference.DataType\x12\x0c\n\x04dims\x18\x02 \x03(\x03\x12\x13"
    b"\n\tzero_data\x18\x03 \x01(\x08H\x00\x12\x15\n\x0brandom_data\x18\x04 \x01(\x08"
    b"H\x00\x12\x19\n\x0finput_data_file\x18\x05 \x01(\tH\x00B\x11\n\x0finput_d"
    b"ata_type\x1aK\n\x0bInputsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12+\n\x05"
    b"value\x18\x02 \x01(\x0b2\x1c.inference.ModelWarmup.Inpu"
    b't:\x028\x01".\n\x0fModelOperations\x12\x1b\n\x13op_library_f'
    b'ilename\x18\x01 \x03(\t"+\n\x16ModelTransactionPolicy\x12'
    b'\x11\n\tdecoupled\x18\x01 \x01(\x08"\xe6\x01\n\x15ModelRepositoryAg'
    b"ents\x126\n\x06agents\x18\x01 \x03(\x0b2&.inference.ModelRe"
    b"positoryAgents.Agent\x1a\x94\x01\n\x05Agent\x12\x0c\n\x04name\x18\x01"
    b" \x01(\t\x12J\n\nparameters\x18\x02 \x03(\x0b26.inference.Mod"
    b"elRepositoryAgents.Agent.ParametersEntry"
    b"\x1a1\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05valu"
    b'e\x18\x02 \x01(\t:\x028\x01"$\n\x12ModelResponseCache\x12\x0e\n\x06ena'
    b'ble\x18\x01 \x01(\x08"\xe2\x02\n\x0cModelMetrics\x12=\n\x0emetric_con'
    b"trol\x18\x01 \x03(\x0b2%.inference.ModelMetrics.Metr"
    b"icControl\x1a\x92\x02\n\rMetricControl\x12Q\n\x11metric_id"
    b"entifier\x18\x01 \x01(\x0b26.inference.ModelMetrics."
    b"MetricControl.MetricIdentifier\x12S\n\x11histog"
    b"ram_options\x18\x02 \x01(\x0b26.inference.ModelMetri"
    b'cs.MetricControl.HistogramOptionsH\x00\x1a"\n\x10M'
    b"etricIdentifier\x12\x0e\n\x06family\x18\x01 \x01(\t\x1a#\n\x10Histo"
    b"gramOptions\x12\x0f\n\x07buckets\x18\x01 \x03(\x01B\x10\n\x0emetric_o"
    b'ptions"\xf3\n\n\x0bModelConfig\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08'
    b"platform\x18\x02 \x01(\t\x12\x0f\n\x07backend\x18\x11 \x01(\t\x12\x0f\n\x07runti"
    b"me\x18\x19 \x01(\t\x125\n\x0eversion_policy\x18\x03 \x01(\x0b2\x1d.infer"
    b"ence.ModelVersionPolicy\x12\x16\n\x0emax_batch_siz"
    b"e\x18\x04 \x01(\x05\x12$\n\x05input\x18\x05 \x03(\x0b2\x15.inference.Model"
    b"Input\x12&\n\x06output\x18\x06 \x03(\x0b2\x16.inference.ModelO"
    b"utput\x12*\n\x0bbatch_input\x18\x14 \x03(\x0b2\x15.inference.B"
    b"atchInput\x12,\n\x0cbatch_output\x18\x15 \x03(\x0b2\x16.infere"
    b'nce.BatchOutput\x128\n\x0coptimization\x18\x0c \x01(\x0b2".'
    b"inference.ModelOptimizationPolicy\x12;\n\x10dyn"
    b"amic_batching\x18\x0b \x01(\x0b2\x1f.inference.ModelDyn"
    b"amicBatchingH\x00\x12=\n\x11sequence_batching\x18\r \x01("
    b"\x0b2 .inference.ModelSequenceBatchingH\x00\x129\n"
    b"\x13ensemble_scheduling\x18\x0f \x01(\x0b2\x1a.inference.M"
    b"odelEnsemblingH\x00\x125\n\x0einstance_group\x18\x07 \x03(\x0b"
    b"2\x1d.inference.ModelInstanceGroup\x12\x1e\n\x16defau"
    b"lt_model_filename\x18\x08 \x01(\t\x12H\n\x12cc_model_file"
    b"names\x18\t \x03(\x0b2,.inference.ModelConfig.CcMo"
    b"delFilenamesEntry\x12;\n\x0bmetric_tags\x18\n \x03(\x0b2&"
    b".inference.ModelConfig.MetricTagsEntry\x12:"
    b"\n\nparameters\x18\x0e \x03(\x0b2&.inference.ModelConf"
    b"ig.ParametersEntry\x12,\n\x0cmodel_warmup\x18\x10 \x03(\x0b"
    b"2\x16.inference.ModelWarmup\x124\n\x10model_operat"
    b"ions\x18\x12 \x01(\x0b2\x1a.inference.ModelOperations\x12C"
    b"\n\x18model_transaction_policy\x18\x13 \x01(\x0b2!.infer"
    b"ence.ModelTransactionPolicy\x12A\n\x17model_rep"
    b"ository_agents\x18\x17 \x01(\x0b2 .inference.ModelRe"
    b"positoryAgents\x125\n\x0eresponse_cache\x18\x18 \x01(\x0b2\x1d"
    b".inference.ModelResponseCache\x12.\n\rmodel_m"
    b"etrics\x18\x1a \x01(\x0b2\x17.inference.ModelMetrics\x1a7\n"
    b"\x15CcModelFilenamesEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05v"
    b"alue\x18\x02 \x01(\t:\x028\x01\x1a1\n\x0fMetricTagsEntry\x12\x0b\n\x03key"
    b"\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1aL\n\x0fParametersE"
    b"ntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.infer"
    b"ence.ModelParameter:\x028\x01B\x13\n\x11scheduling_ch"
    b"oice*\xfa\x01\n\x08DataType\x12\x10\n\x0cTYPE_INVALID\x10\x00\x12\r\n\tT"
    b"YPE_BOOL\x10\x01\x12\x0e\n\nTYPE_UINT8\x10\x02\x12\x0f\n\x0bTYPE_UINT1"
    b"6\x10\x03\x12\x0f\n\x0bTYPE_UINT32\x10\x04\x12\x0f\n\x0bTYPE_UINT64\x10\x05\x12\r\n"
    b"\tTYPE_INT8\x10\x06\x12\x0e\n\nTYPE_INT16\x10\x07\x12\x0e\n\nTYPE_INT"
    b"32\x10\x08\x12\x0e\n\nTYPE_INT64\x10\t\x12\r\n\tTYPE_FP16\x10\n\x12\r\n\tT"
    b"YPE_FP32\x10\x0b\x12\r\n\tTYPE_FP64\x10\x0c\x12\x0f\n\x0bTYPE_STRING"
    b"\x10\r\x12\r\n\tTYPE_BF16\x10\x0eb\x06proto3"
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
