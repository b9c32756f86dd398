{{/* Refuses values that install something which cannot work, with a sentence that says what to set. */}}
{{- define "pilotfish.checks" -}}
{{- $groups := include "pilotfish.groups" . | fromYaml -}}
{{- $faults := list -}}
{{- $presets := .Files.Get "files/presets.yaml" | fromYaml -}}
{{- range $model := (include "pilotfish.models" . | fromYaml).models -}}
{{- $preset := get $presets $model.arguments.config -}}
{{- $target := merge (deepCopy $model.arguments.target) (deepCopy $preset.target) -}}
{{- range $name, $group := $groups -}}
{{- if and (eq $group.resource $target.node_resource) (eq $group.role "target") (eq $target.device "cuda") -}}
{{- $found := dict "root" $ "name" $name "group" $group "target" $target "preset" $preset -}}
{{- $faults = concat $faults (include "pilotfish.targetFaults" $found | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $faults -}}
{{- fail (join "; " (uniq .)) -}}
{{- end -}}
{{- with .Values.serve -}}
{{- if eq .upgrade "NewClusterWithIncrementalUpgrade" -}}
{{- if not $.Values.autoscaling.enabled -}}
{{- fail "serve.upgrade: NewClusterWithIncrementalUpgrade needs Ray's autoscaler; set autoscaling.enabled to true" -}}
{{- end -}}
{{- if not .incrementalUpgrade.gatewayClassName -}}
{{- fail "serve.incrementalUpgrade.gatewayClassName: NewClusterWithIncrementalUpgrade needs the class of a Gateway" -}}
{{- end -}}
{{- if gt (int .incrementalUpgrade.stepSizePercent) (int .incrementalUpgrade.maxSurgePercent) -}}
{{- fail "serve.incrementalUpgrade: stepSizePercent must be at most maxSurgePercent" -}}
{{- end -}}
{{- end -}}
{{- if and $.Values.gcsFaultTolerance.externalStorageNamespace (ne .upgrade "None") -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace: with serve.upgrade two clusters run at once and must not share it; leave it empty, or set serve.upgrade to None" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Why a group cannot run a model on GPUs, as a list: call with (dict "root" . "name" NAME "group" GROUP "target" SETTINGS "preset" PRESET).
*/}}
{{- define "pilotfish.targetFaults" -}}
{{- $faults := list -}}
{{- $version := .root.Chart.AppVersion -}}
{{- $image := include "pilotfish.image" (list .root .group.image) -}}
{{- if hasSuffix (printf ":%s" $version) $image -}}
{{- $faults = append $faults (printf "image.tag: %s has no CUDA, and settings.target.device is cuda; set it to an image of the target cuda, as %s-cuda" $image $version) -}}
{{- end -}}
{{- $ranks := int .target.tensor_parallel -}}
{{- if lt (int .group.gpus) $ranks -}}
{{- $faults = append $faults (printf "workers.%s.gpus: is %d, and a target needs %d; settings.target.tensor_parallel says so" .name (int .group.gpus) $ranks) -}}
{{- end -}}
{{- $memory := include "pilotfish.bytes" .group.memory | float64 -}}
{{- if and (eq .target.path .preset.target.path) (lt $memory (.preset.memory_bytes | float64)) -}}
{{- $least := div (int64 .preset.memory_bytes) 1073741824 -}}
{{- $faults = append $faults (printf "workers.%s.memory: is %s, and %s needs %dGi" .name .group.memory .target.path $least) -}}
{{- end -}}
{{- toYaml $faults -}}
{{- end -}}

{{/* A quantity of memory in bytes, in scientific notation for large ones. */}}
{{- define "pilotfish.bytes" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- mulf ($number | float64) (get $units (trimPrefix $number .) | float64) -}}
{{- end -}}
