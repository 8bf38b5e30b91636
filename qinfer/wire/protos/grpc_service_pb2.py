"""Messages of grpc_service.proto; written by scripts/generate_protos.py."""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

from qinfer.wire.protos import model_config_pb2  # noqa: F401 - defines what it imports

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b"\n\x12grpc_service.proto\x12\tinference\x1a\x12model_c"
    b'onfig.proto"\x13\n\x11ServerLiveRequest""\n\x12Serv'
    b'erLiveResponse\x12\x0c\n\x04live\x18\x01 \x01(\x08"\x14\n\x12ServerRe'
    b'adyRequest"$\n\x13ServerReadyResponse\x12\r\n\x05rea'
    b'dy\x18\x01 \x01(\x08"2\n\x11ModelReadyRequest\x12\x0c\n\x04name\x18\x01 '
    b'\x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t"#\n\x12ModelReadyRespon'
    b'se\x12\r\n\x05ready\x18\x01 \x01(\x08"\x17\n\x15ServerMetadataReque'
    b'st"K\n\x16ServerMetadataResponse\x12\x0c\n\x04name\x18\x01 \x01'
    b'(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\x12\n\nextensions\x18\x03 \x03(\t"'
    b"5\n\x14ModelMetadataRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n"
    b'\x07version\x18\x02 \x01(\t"\x8d\x02\n\x15ModelMetadataResponse'
    b"\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08versions\x18\x02 \x03(\t\x12\x10\n\x08plat"
    b"form\x18\x03 \x01(\t\x12?\n\x06inputs\x18\x04 \x03(\x0b2/.inference.M"
    b"odelMetadataResponse.TensorMetadata\x12@\n\x07o"
    b"utputs\x18\x05 \x03(\x0b2/.inference.ModelMetadataRe"
    b"sponse.TensorMetadata\x1a?\n\x0eTensorMetadata\x12"
    b"\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05shape"
    b'\x18\x03 \x03(\x03"\x99\x01\n\x0eInferParameter\x12\x14\n\nbool_param\x18'
    b"\x01 \x01(\x08H\x00\x12\x15\n\x0bint64_param\x18\x02 \x01(\x03H\x00\x12\x16\n\x0cstring"
    b"_param\x18\x03 \x01(\tH\x00\x12\x16\n\x0cdouble_param\x18\x04 \x01(\x01H\x00\x12\x16"
    b"\n\x0cuint64_param\x18\x05 \x01(\x04H\x00B\x12\n\x10parameter_choi"
    b'ce"\xd0\x01\n\x13InferTensorContents\x12\x15\n\rbool_conte'
    b"nts\x18\x01 \x03(\x08\x12\x14\n\x0cint_contents\x18\x02 \x03(\x05\x12\x16\n\x0eint64"
    b"_contents\x18\x03 \x03(\x03\x12\x15\n\ruint_contents\x18\x04 \x03(\r\x12\x17"
    b"\n\x0fuint64_contents\x18\x05 \x03(\x04\x12\x15\n\rfp32_contents"
    b"\x18\x06 \x03(\x02\x12\x15\n\rfp64_contents\x18\x07 \x03(\x01\x12\x16\n\x0ebytes_c"
    b'ontents\x18\x08 \x03(\x0c"\xee\x06\n\x11ModelInferRequest\x12\x12\n\nm'
    b"odel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\n"
    b"\n\x02id\x18\x03 \x01(\t\x12@\n\nparameters\x18\x04 \x03(\x0b2,.inferen"
    b"ce.ModelInferRequest.ParametersEntry\x12=\n\x06"
    b"inputs\x18\x05 \x03(\x0b2-.inference.ModelInferReque"
    b"st.InferInputTensor\x12H\n\x07outputs\x18\x06 \x03(\x0b27.i"
    b"nference.ModelInferRequest.InferRequeste"
    b"dOutputTensor\x12\x1a\n\x12raw_input_contents\x18\x07 \x03("
    b"\x0c\x1a\x94\x02\n\x10InferInputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08"
    b"datatype\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 \x03(\x03\x12Q\n\nparamet"
    b"ers\x18\x04 \x03(\x0b2=.inference.ModelInferRequest."
    b"InferInputTensor.ParametersEntry\x120\n\x08cont"
    b"ents\x18\x05 \x01(\x0b2\x1e.inference.InferTensorConten"
    b"ts\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05va"
    b"lue\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01"
    b"\x1a\xd5\x01\n\x1aInferRequestedOutputTensor\x12\x0c\n\x04name\x18"
    b"\x01 \x01(\t\x12[\n\nparameters\x18\x02 \x03(\x0b2G.inference.Mo"
    b"delInferRequest.InferRequestedOutputTens"
    b"or.ParametersEntry\x1aL\n\x0fParametersEntry\x12\x0b\n"
    b"\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.In"
    b"ferParameter:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03k"
    b"ey\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.Infe"
    b'rParameter:\x028\x01"\xd5\x04\n\x12ModelInferResponse\x12\x12\n'
    b"\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t"
    b"\x12\n\n\x02id\x18\x03 \x01(\t\x12A\n\nparameters\x18\x04 \x03(\x0b2-.infer"
    b"ence.ModelInferResponse.ParametersEntry\x12"
    b"@\n\x07outputs\x18\x05 \x03(\x0b2/.inference.ModelInferR"
    b"esponse.InferOutputTensor\x12\x1b\n\x13raw_output_"
    b"contents\x18\x06 \x03(\x0c\x1a\x97\x02\n\x11InferOutputTensor\x12\x0c\n\x04"
    b"name\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 "
    b"\x03(\x03\x12S\n\nparameters\x18\x04 \x03(\x0b2?.inference.Mode"
    b"lInferResponse.InferOutputTensor.Paramet"
    b"ersEntry\x120\n\x08contents\x18\x05 \x01(\x0b2\x1e.inference.I"
    b"nferTensorContents\x1aL\n\x0fParametersEntry\x12\x0b\n"
    b"\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.In"
    b"ferParameter:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03k"
    b"ey\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.Infe"
    b'rParameter:\x028\x01"h\n\x18ModelStreamInferRespon'
    b"se\x12\x15\n\rerror_message\x18\x01 \x01(\t\x125\n\x0einfer_respo"
    b"nse\x18\x02 \x01(\x0b2\x1d.inference.ModelInferResponse"
    b'"3\n\x12ModelConfigRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07'
    b'version\x18\x02 \x01(\t"=\n\x13ModelConfigResponse\x12&\n\x06'
    b'config\x18\x01 \x01(\x0b2\x16.inference.ModelConfig"7\n\x16'
    b"ModelStatisticsRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07"
    b'version\x18\x02 \x01(\t".\n\x11StatisticDuration\x12\r\n\x05co'
    b'unt\x18\x01 \x01(\x04\x12\n\n\x02ns\x18\x02 \x01(\x04"\x9c\x03\n\x0fInferStatistic'
    b"s\x12-\n\x07success\x18\x01 \x01(\x0b2\x1c.inference.Statistic"
    b"Duration\x12*\n\x04fail\x18\x02 \x01(\x0b2\x1c.inference.Stati"
    b"sticDuration\x12+\n\x05queue\x18\x03 \x01(\x0b2\x1c.inference."
    b"StatisticDuration\x123\n\rcompute_input\x18\x04 \x01(\x0b"
    b"2\x1c.inference.StatisticDuration\x123\n\rcomput"
    b"e_infer\x18\x05 \x01(\x0b2\x1c.inference.StatisticDurat"
    b"ion\x124\n\x0ecompute_output\x18\x06 \x01(\x0b2\x1c.inference."
    b"StatisticDuration\x12/\n\tcache_hit\x18\x07 \x01(\x0b2\x1c.i"
    b"nference.StatisticDuration\x120\n\ncache_miss"
    b'\x18\x08 \x01(\x0b2\x1c.inference.StatisticDuration"\xc3\x02\n'
    b"\x17InferResponseStatistics\x123\n\rcompute_infe"
    b"r\x18\x01 \x01(\x0b2\x1c.inference.StatisticDuration\x124\n"
    b"\x0ecompute_output\x18\x02 \x01(\x0b2\x1c.inference.Statis"
    b"ticDuration\x12-\n\x07success\x18\x03 \x01(\x0b2\x1c.inference"
    b".StatisticDuration\x12*\n\x04fail\x18\x04 \x01(\x0b2\x1c.infer"
    b"ence.StatisticDuration\x124\n\x0eempty_response"
    b"\x18\x05 \x01(\x0b2\x1c.inference.StatisticDuration\x12,\n\x06"
    b"cancel\x18\x06 \x01(\x0b2\x1c.inference.StatisticDurati"
    b'on"\xca\x01\n\x14InferBatchStatistics\x12\x12\n\nbatch_siz'
    b"e\x18\x01 \x01(\x04\x123\n\rcompute_input\x18\x02 \x01(\x0b2\x1c.inferen"
    b"ce.StatisticDuration\x123\n\rcompute_infer\x18\x03 "
    b"\x01(\x0b2\x1c.inference.StatisticDuration\x124\n\x0ecom"
    b"pute_output\x18\x04 \x01(\x0b2\x1c.inference.StatisticD"
    b'uration":\n\x0bMemoryUsage\x12\x0c\n\x04type\x18\x01 \x01(\t\x12\n\n\x02'
    b'id\x18\x02 \x01(\x03\x12\x11\n\tbyte_size\x18\x03 \x01(\x04"\xb4\x03\n\x0fModelSta'
    b"tistics\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\x16"
    b"\n\x0elast_inference\x18\x03 \x01(\x04\x12\x17\n\x0finference_coun"
    b"t\x18\x04 \x01(\x04\x12\x17\n\x0fexecution_count\x18\x05 \x01(\x04\x123\n\x0finfe"
    b"rence_stats\x18\x06 \x01(\x0b2\x1a.inference.InferStati"
    b"stics\x124\n\x0bbatch_stats\x18\x07 \x03(\x0b2\x1f.inference.I"
    b"nferBatchStatistics\x12,\n\x0cmemory_usage\x18\x08 \x03("
    b"\x0b2\x16.inference.MemoryUsage\x12E\n\x0eresponse_st"
    b"ats\x18\t \x03(\x0b2-.inference.ModelStatistics.Re"
    b"sponseStatsEntry\x1aX\n\x12ResponseStatsEntry\x12\x0b"
    b'\n\x03key\x18\x01 \x01(\t\x121\n\x05value\x18\x02 \x01(\x0b2".inference.I'
    b'nferResponseStatistics:\x028\x01"J\n\x17ModelStati'
    b"sticsResponse\x12/\n\x0bmodel_stats\x18\x01 \x03(\x0b2\x1a.inf"
    b'erence.ModelStatistics"\x8a\x01\n\x18ModelReposito'
    b"ryParameter\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x15\n\x0bint"
    b"64_param\x18\x02 \x01(\x03H\x00\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00"
    b"\x12\x15\n\x0bbytes_param\x18\x04 \x01(\x0cH\x00B\x12\n\x10parameter_cho"
    b'ice"@\n\x16RepositoryIndexRequest\x12\x17\n\x0freposit'
    b'ory_name\x18\x01 \x01(\t\x12\r\n\x05ready\x18\x02 \x01(\x08"\xa4\x01\n\x17Reposi'
    b"toryIndexResponse\x12=\n\x06models\x18\x01 \x03(\x0b2-.infe"
    b"rence.RepositoryIndexResponse.ModelIndex"
    b"\x1aJ\n\nModelIndex\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18"
    b'\x02 \x01(\t\x12\r\n\x05state\x18\x03 \x01(\t\x12\x0e\n\x06reason\x18\x04 \x01(\t"\xec\x01\n'
    b"\x1aRepositoryModelLoadRequest\x12\x17\n\x0frepositor"
    b"y_name\x18\x01 \x01(\t\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x12I\n\npara"
    b"meters\x18\x03 \x03(\x0b25.inference.RepositoryModel"
    b"LoadRequest.ParametersEntry\x1aV\n\x0fParameter"
    b"sEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#.inf"
    b'erence.ModelRepositoryParameter:\x028\x01"\x1d\n\x1bR'
    b'epositoryModelLoadResponse"\xf0\x01\n\x1cRepositor'
    b"yModelUnloadRequest\x12\x17\n\x0frepository_name\x18\x01"
    b" \x01(\t\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x12K\n\nparameters\x18\x03"
    b" \x03(\x0b27.inference.RepositoryModelUnloadRe"
    b"quest.ParametersEntry\x1aV\n\x0fParametersEntry"
    b"\x12\x0b\n\x03key\x18\x01 \x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#.inference"
    b'.ModelRepositoryParameter:\x028\x01"\x1f\n\x1dReposit'
    b'oryModelUnloadResponse"/\n\x1fSystemSharedMe'
    b'moryStatusRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"\xa5\x02\n Syst'
    b"emSharedMemoryStatusResponse\x12I\n\x07regions\x18"
    b"\x01 \x03(\x0b28.inference.SystemSharedMemoryStat"
    b"usResponse.RegionsEntry\x1aL\n\x0cRegionStatus\x12"
    b"\x0c\n\x04name\x18\x01 \x01(\t\x12\x0b\n\x03key\x18\x02 \x01(\t\x12\x0e\n\x06offset\x18\x03 \x01"
    b"(\x04\x12\x11\n\tbyte_size\x18\x04 \x01(\x04\x1ah\n\x0cRegionsEntry\x12\x0b\n"
    b"\x03key\x18\x01 \x01(\t\x12G\n\x05value\x18\x02 \x01(\x0b28.inference.Sy"
    b"stemSharedMemoryStatusResponse.RegionSta"
    b'tus:\x028\x01"a\n!SystemSharedMemoryRegisterReq'
    b"uest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0b\n\x03key\x18\x02 \x01(\t\x12\x0e\n\x06offse"
    b't\x18\x03 \x01(\x04\x12\x11\n\tbyte_size\x18\x04 \x01(\x04"$\n"SystemShar'
    b'edMemoryRegisterResponse"3\n#SystemShared'
    b'MemoryUnregisterRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"&\n'
    b'$SystemSharedMemoryUnregisterResponse"-\n'
    b"\x1dCudaSharedMemoryStatusRequest\x12\x0c\n\x04name\x18\x01"
    b' \x01(\t"\x95\x02\n\x1eCudaSharedMemoryStatusResponse\x12'
    b"G\n\x07regions\x18\x01 \x03(\x0b26.inference.CudaSharedM"
    b"emoryStatusResponse.RegionsEntry\x1aB\n\x0cRegi"
    b"onStatus\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x11\n\tdevice_id\x18\x02 \x01("
    b"\x04\x12\x11\n\tbyte_size\x18\x03 \x01(\x04\x1af\n\x0cRegionsEntry\x12\x0b\n\x03"
    b"key\x18\x01 \x01(\t\x12E\n\x05value\x18\x02 \x01(\x0b26.inference.Cud"
    b"aSharedMemoryStatusResponse.RegionStatus"
    b':\x028\x01"i\n\x1fCudaSharedMemoryRegisterRequest\x12'
    b"\x0c\n\x04name\x18\x01 \x01(\t\x12\x12\n\nraw_handle\x18\x02 \x01(\x0c\x12\x11\n\tdev"
    b'ice_id\x18\x03 \x01(\x03\x12\x11\n\tbyte_size\x18\x04 \x01(\x04""\n CudaS'
    b'haredMemoryRegisterResponse"1\n!CudaShare'
    b'dMemoryUnregisterRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"$'
    b'\n"CudaSharedMemoryUnregisterResponse"\xe6\x01\n'
    b"\x13TraceSettingRequest\x12>\n\x08settings\x18\x01 \x03(\x0b2,"
    b".inference.TraceSettingRequest.SettingsE"
    b"ntry\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x1a\x1d\n\x0cSettingValue"
    b"\x12\r\n\x05value\x18\x01 \x03(\t\x1a\\\n\rSettingsEntry\x12\x0b\n\x03key\x18"
    b"\x01 \x01(\t\x12:\n\x05value\x18\x02 \x01(\x0b2+.inference.TraceSe"
    b'ttingRequest.SettingValue:\x028\x01"\xd5\x01\n\x14TraceS'
    b"ettingResponse\x12?\n\x08settings\x18\x01 \x03(\x0b2-.infer"
    b"ence.TraceSettingResponse.SettingsEntry\x1a"
    b"\x1d\n\x0cSettingValue\x12\r\n\x05value\x18\x01 \x03(\t\x1a]\n\rSettin"
    b"gsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12;\n\x05value\x18\x02 \x01(\x0b2,.in"
    b"ference.TraceSettingResponse.SettingValu"
    b'e:\x028\x01"\x9a\x02\n\x12LogSettingsRequest\x12=\n\x08settings'
    b"\x18\x01 \x03(\x0b2+.inference.LogSettingsRequest.Se"
    b"ttingsEntry\x1ah\n\x0cSettingValue\x12\x14\n\nbool_para"
    b"m\x18\x01 \x01(\x08H\x00\x12\x16\n\x0cuint32_param\x18\x02 \x01(\rH\x00\x12\x16\n\x0cstr"
    b"ing_param\x18\x03 \x01(\tH\x00B\x12\n\x10parameter_choice\x1a[\n"
    b"\rSettingsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x129\n\x05value\x18\x02 \x01"
    b"(\x0b2*.inference.LogSettingsRequest.Settin"
    b'gValue:\x028\x01"\x9d\x02\n\x13LogSettingsResponse\x12>\n\x08se'
    b"ttings\x18\x01 \x03(\x0b2,.inference.LogSettingsResp"
    b"onse.SettingsEntry\x1ah\n\x0cSettingValue\x12\x14\n\nbo"
    b"ol_param\x18\x01 \x01(\x08H\x00\x12\x16\n\x0cuint32_param\x18\x02 \x01(\rH\x00"
    b"\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00B\x12\n\x10parameter_ch"
    b"oice\x1a\\\n\rSettingsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12:\n\x05va"
    b"lue\x18\x02 \x01(\x0b2+.inference.LogSettingsRespons"
    b"e.SettingValue:\x028\x012\xb7\x0f\n\x14GRPCInferenceServ"
    b"ice\x12K\n\nServerLive\x12\x1c.inference.ServerLive"
    b'Request\x1a\x1d.inference.ServerLiveResponse"\x00'
    b"\x12N\n\x0bServerReady\x12\x1d.inference.ServerReadyR"
    b'equest\x1a\x1e.inference.ServerReadyResponse"\x00'
    b"\x12K\n\nModelReady\x12\x1c.inference.ModelReadyReq"
    b'uest\x1a\x1d.inference.ModelReadyResponse"\x00\x12W\n'
    b"\x0eServerMetadata\x12 .inference.ServerMetada"
    b"taRequest\x1a!.inference.ServerMetadataResp"
    b'onse"\x00\x12T\n\rModelMetadata\x12\x1f.inference.Mode'
    b"lMetadataRequest\x1a .inference.ModelMetada"
    b'taResponse"\x00\x12K\n\nModelInfer\x12\x1c.inference.M'
    b"odelInferRequest\x1a\x1d.inference.ModelInferR"
    b'esponse"\x00\x12[\n\x10ModelStreamInfer\x12\x1c.inferenc'
    b"e.ModelInferRequest\x1a#.inference.ModelStr"
    b'eamInferResponse"\x00(\x010\x01\x12N\n\x0bModelConfig\x12\x1d.'
    b"inference.ModelConfigRequest\x1a\x1e.inference"
    b'.ModelConfigResponse"\x00\x12Z\n\x0fModelStatistic'
    b's\x12!.inference.ModelStatisticsRequest\x1a".i'
    b'nference.ModelStatisticsResponse"\x00\x12Z\n\x0fRe'
    b"positoryIndex\x12!.inference.RepositoryInde"
    b'xRequest\x1a".inference.RepositoryIndexResp'
    b'onse"\x00\x12f\n\x13RepositoryModelLoad\x12%.inferenc'
    b"e.RepositoryModelLoadRequest\x1a&.inference"
    b'.RepositoryModelLoadResponse"\x00\x12l\n\x15Reposi'
    b"toryModelUnload\x12'.inference.RepositoryMo"
    b"delUnloadRequest\x1a(.inference.RepositoryM"
    b'odelUnloadResponse"\x00\x12u\n\x18SystemSharedMemo'
    b"ryStatus\x12*.inference.SystemSharedMemoryS"
    b"tatusRequest\x1a+.inference.SystemSharedMem"
    b'oryStatusResponse"\x00\x12{\n\x1aSystemSharedMemor'
    b"yRegister\x12,.inference.SystemSharedMemory"
    b"RegisterRequest\x1a-.inference.SystemShared"
    b'MemoryRegisterResponse"\x00\x12\x81\x01\n\x1cSystemShare'
    b"dMemoryUnregister\x12..inference.SystemShar"
    b"edMemoryUnregisterRequest\x1a/.inference.Sy"
    b'stemSharedMemoryUnregisterResponse"\x00\x12o\n\x16'
    b"CudaSharedMemoryStatus\x12(.inference.CudaS"
    b"haredMemoryStatusRequest\x1a).inference.Cud"
    b'aSharedMemoryStatusResponse"\x00\x12u\n\x18CudaSha'
    b"redMemoryRegister\x12*.inference.CudaShared"
    b"MemoryRegisterRequest\x1a+.inference.CudaSh"
    b'aredMemoryRegisterResponse"\x00\x12{\n\x1aCudaShar'
    b"edMemoryUnregister\x12,.inference.CudaShare"
    b"dMemoryUnregisterRequest\x1a-.inference.Cud"
    b'aSharedMemoryUnregisterResponse"\x00\x12Q\n\x0cTra'
    b"ceSetting\x12\x1e.inference.TraceSettingReques"
    b't\x1a\x1f.inference.TraceSettingResponse"\x00\x12N\n\x0b'
    b"LogSettings\x12\x1d.inference.LogSettingsReque"
    b'st\x1a\x1e.inference.LogSettingsResponse"\x00b\x06pr'
    b"oto3"
)

builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
