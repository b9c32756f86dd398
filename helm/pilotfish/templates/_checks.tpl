{{/* Refuses values that install something which cannot work, with a sentence that says what to set. */}}
{{- define "pilotfish.checks" -}}
{{- $groups := include "pilotfish.groups" . | fromYaml -}}
{{- $faults := list -}}
{{- $presets := .Files.Get "files/presets.yaml" | fromYaml -}}
{{- range $model := (include "pilotfish.models" . | fromYaml).models -}}
{{- $preset := get $presets $model.arguments.config -}}
{{- $target := merge (deepCopy $model.arguments.target) (deepCopy $preset.target) -}}
{{- $gpus := 0 -}}
{{- range $name, $group := $groups -}}
{{- if and (eq $group.resource (toString $target.node_resource)) (eq $group.role "target") (eq $target.device "cuda") -}}
{{- $gpus = add $gpus (mul $group.gpus $group.most) -}}
{{- $found := dict "root" $ "name" $name "group" $group "target" $target "preset" $preset -}}
{{- $faults = concat $faults (include "pilotfish.targetFaults" $found | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- if and $target.span_nodes (gt (int $gpus) 0) -}}
{{- if lt (int $gpus) (mul $target.tensor_parallel $target.replicas | int) -}}
{{- $faults = append $faults (printf "settings.target.replicas: is %d with %d ranks each, and the pods of the targets have %d GPUs together" (int $target.replicas) (int $target.tensor_parallel) (int $gpus)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $faults = concat $faults (include "pilotfish.unusedSettings" . | fromYamlArray) (include "pilotfish.modelFaults" . | fromYamlArray) -}}
{{- range $door := tuple "ingress" "gateway" -}}
{{- $values := get $.Values $door -}}
{{- if and $values.enabled (eq $values.http.host $values.grpc.host) -}}
{{- $faults = append $faults (printf "%s.grpc.host: is that of %s.http, %q; the two APIs need different hosts" $door $door $values.http.host) -}}
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
{{- if lt (int .group.gpus) (ternary 1 $ranks (.target.span_nodes | default false)) -}}
{{- $faults = append $faults (printf "workers.%s.gpus: is %d, and a target needs %d; settings.target.tensor_parallel says so" .name (int .group.gpus) $ranks) -}}
{{- end -}}
{{- $cores := include "pilotfish.bytes" .group.cpu | float64 | ceil -}}
{{- with get .group.rayStartParams "num-cpus" -}}
{{- $cores = float64 . -}}
{{- end -}}
{{- $here := min $ranks (max 1 .group.gpus) -}}
{{- /* A rank claims a core, and the coordinator a part of one. */}}
{{- if le $cores (float64 $here) -}}
{{- $faults = append $faults (printf "workers.%s.cpu: is %s, and %d ranks on GPUs need more than %d cores" .name .group.cpu $here $here) -}}
{{- end -}}
{{- $memory := include "pilotfish.bytes" .group.memory | float64 -}}
{{- if and (eq .target.path .preset.target.path) (lt $memory (.preset.memory_bytes | float64)) -}}
{{- $least := div (int64 .preset.memory_bytes) 1073741824 -}}
{{- $faults = append $faults (printf "workers.%s.memory: is %s, and %s needs %dGi" .name .group.memory .target.path $least) -}}
{{- end -}}
{{- toYaml $faults -}}
{{- end -}}

{{/* The settings that say what the chart itself decides, and would be ignored, as a list of faults. */}}
{{- define "pilotfish.unusedSettings" -}}
{{- $faults := list -}}
{{- $unused := dict "application" "it is serve.application or the name in applications" -}}
{{- $_ := set $unused "route_prefix" "it is serve.routePrefix or the routePrefix in applications" -}}
{{- $_ := set $unused "http_port" "pods listen on port 8000, and service.http.port is the port of clients" -}}
{{- $sections := list (dict "path" "settings" "settings" .Values.settings "unused" $unused) -}}
{{- $further := merge (dict "http_host" "all models have the HTTP address of the first") $unused -}}
{{- range $index, $model := .Values.applications -}}
{{- $path := printf "applications[%d].settings" $index -}}
{{- $sections = append $sections (dict "path" $path "settings" ($model.settings | default dict) "unused" $further) -}}
{{- end -}}
{{- range $section := $sections -}}
{{- range $key, $instead := $section.unused -}}
{{- if hasKey ($section.settings.server | default dict) $key -}}
{{- $faults = append $faults (printf "%s.server.%s: has no effect here; %s" $section.path $key $instead) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $section.path "settings") (hasKey ($section.settings.cluster | default dict) "memory_threshold") -}}
{{- $faults = append $faults (printf "%s.cluster.memory_threshold: has no effect here; settings.cluster has that of all pods" $section.path) -}}
{{- end -}}
{{- if hasKey ($section.settings.cluster | default dict) "token_file" -}}
{{- $faults = append $faults (printf "%s.cluster.token_file: has no effect here; secrets.cluster has the token" $section.path) -}}
{{- end -}}
{{- end -}}
{{- toYaml $faults -}}
{{- end -}}

{{/* Names, paths, ports and pods that models cannot share or lack, as a list of faults. */}}
{{- define "pilotfish.modelFaults" -}}
{{- $faults := list -}}
{{- $groups := include "pilotfish.groups" . | fromYaml -}}
{{- $taken := dict -}}
{{- range $model := (include "pilotfish.models" . | fromYaml).models -}}
{{- range $key := tuple "name" "routePrefix" -}}
{{- $entry := printf "%s %s" $key (get $model $key) -}}
{{- if hasKey $taken $entry -}}
{{- $faults = append $faults (printf "applications: two models have the %s" $entry) -}}
{{- end -}}
{{- $_ := set $taken $entry "" -}}
{{- end -}}
{{- $server := $model.arguments.server -}}
{{- $ports := get $taken $server.ingress_node_resource | default (dict "8000" "HTTP" "8080" "Ray's metrics" "52365" "Ray's agent") -}}
{{- range $key := tuple "grpc_port" "operations_port" -}}
{{- if gt (get $server $key | default 0 | int) 0 -}}
{{- $port := get $server $key | int | toString -}}
{{- $name := printf "settings.server.%s of %s" $key $model.name -}}
{{- if hasKey $ports $port -}}
{{- $faults = append $faults (printf "%s: is %s, the port of %s in the same pods; set it to another one" $name $port (get $ports $port)) -}}
{{- end -}}
{{- $_ := set $ports $port $name -}}
{{- end -}}
{{- end -}}
{{- $_ := set $taken $server.ingress_node_resource $ports -}}
{{- if eq (int $server.grpc_port) 0 -}}
{{- $faults = append $faults (printf "settings.server.grpc_port of %s: is 0; it must be the number of a port" $model.name) -}}
{{- end -}}
{{- $most := dig "autoscaling" "max_replicas" 0 $model.arguments.target | int -}}
{{- if and (gt $most 0) (lt $most ($model.arguments.target.replicas | default 1 | int)) -}}
{{- $faults = append $faults (printf "settings.target.autoscaling.max_replicas of %s: is %d; it must be 0 or at least the %d replicas" $model.name $most (int $model.arguments.target.replicas)) -}}
{{- end -}}
{{- if gt (len $server.allowed_hosts) 64 -}}
{{- $faults = append $faults (printf "settings.server.allowed_hosts of %s: has %d names with those of the Services; it must have at most 64" $model.name (len $server.allowed_hosts)) -}}
{{- end -}}
{{- range $role, $resource := dict "target" $model.arguments.target.node_resource "ingress" $server.ingress_node_resource -}}
{{- $pods := 0 -}}
{{- range $group := $groups -}}
{{- if and (eq $group.resource (toString $resource)) (eq $group.role $role) -}}
{{- $pods = add $pods $group.most -}}
{{- end -}}
{{- end -}}
{{- if and (hasPrefix "pilotfish-" (toString $resource)) (eq (int $pods) 0) -}}
{{- $group := trimPrefix "pilotfish-" $resource -}}
{{- $faults = append $faults (printf "workers.%s.replicas: has no pod for the %s of %s; it needs at least 1, with the role %s" $group $role $model.name $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $faults -}}
{{- end -}}

{{/* A quantity of memory in bytes, in scientific notation for large ones. */}}
{{- define "pilotfish.bytes" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- mulf ($number | float64) (get $units (trimPrefix $number .) | float64) -}}
{{- end -}}
